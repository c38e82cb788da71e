"""Which mechanism runs a convolution, seen where it is launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pycutfuse import support
from pycutfuse.ops import _conv_launch


@contextmanager
def mechanisms() -> Iterator[list[str]]:
    """Those of the convolutions that are launched while it is open, in order, in all threads."""
    found: list[str] = []
    launch: Any = _conv_launch.launch

    def watched(recipe: _conv_launch.ConvRecipe, *rest: Any) -> Any:
        found.append(support.conv_mechanism(recipe.plan))
        return launch(recipe, *rest)

    untyped: Any = _conv_launch
    untyped.launch = watched
    try:
        yield found
    finally:
        untyped.launch = launch
