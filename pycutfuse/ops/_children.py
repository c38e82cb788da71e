"""Children of a module that run one after the other, at the tier that its call asks for."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pycutfuse import config

OTHER_CHILD = "a child of another type, or with a parametrization"
"""The reason why children run whose contractions are not known."""

_CONTRACTIONS = (F.linear, F.conv2d, F.conv_transpose2d)


def asks_more(x: Tensor, precision: str | None, is_strict: Callable[[Tensor, str], bool]) -> bool:
    """Whether a module's call asks for more than torch's flags allow.

    Parameters
    ----------
    is_strict : callable
        `_contraction.is_strict`, or that of convolutions in `_conv_call`.
    """
    return isinstance(x, Tensor) and is_strict(x, precision or config.current_precision())


def report(
    operator: str,
    reason: str,
    x: Tensor,
    precision: str | None,
    is_strict: Callable[[Tensor, str], bool],
) -> AbstractContextManager[object]:
    """Report that children run, and return the context in which they are to.

    torch's flags are read and never written: of a call that `asks_more` known contractions go
    through float64, with their gradients.
    """
    strict = asks_more(x, precision, is_strict)
    config.report_fallback(operator, why(reason, strict))
    return _Wide() if strict and holds_tier(reason) else nullcontext()


def holds_tier(reason: str) -> bool:
    """Whether an explicit ``"ieee"`` holds for children that run for this reason."""
    return reason != OTHER_CHILD


def why(reason: str, strict: bool) -> str:
    """`reason`, and the tier where it is not the call's; `strict` as `asks_more` says."""
    if not strict or holds_tier(reason):
        return reason
    return f"{reason}; at tf32, as torch's flags allow, and not at ieee"


class _Wide(TorchFunctionMode):
    """torch's contractions of float32 tensors go through float64."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        first = args[0] if args else named.get("input")
        if func not in _CONTRACTIONS or getattr(first, "dtype", None) is not torch.float32:
            return func(*args, **named)
        wide = func(*map(_double, args), **{name: _double(named[name]) for name in named})
        return wide.to(torch.float32)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value
