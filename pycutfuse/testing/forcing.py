"""Forced policies and the promotion factor, for the whole process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pycutfuse._knobs import knobs
from pycutfuse.ops import _launch

if TYPE_CHECKING:
    from pycutfuse._C import GemmPolicy


@contextmanager
def forced_policy(policy: "GemmPolicy | None") -> Iterator[None]:
    """Launch with `policy`, one of ``_C.compiled_policies()``, whatever the problem's size."""
    outer = knobs.policy
    _launch.clear_caches()
    knobs.policy = policy
    try:
        yield
    finally:
        knobs.policy = outer
        _launch.clear_caches()


@contextmanager
def exact_promotion() -> Iterator[None]:
    """Add partial sums without the factor that takes back truncation: exact sums stay exact.

    Examples
    --------
    >>> with exact_promotion():
    ...     knobs.promotion
    1.0
    """
    outer = knobs.promotion
    knobs.promotion = 1.0
    try:
        yield
    finally:
        knobs.promotion = outer
