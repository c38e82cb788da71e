"""Which path a module took: fused kernels, or PyTorch for some reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pycutfuse.config import counters
from pycutfuse.explaining import explain

FUSED, HAND_OVER, FALLBACK = "fused", "hand-over", "fallback"


@dataclass(frozen=True)
class Route:
    """What ran.

    Attributes
    ----------
    path : {"fused", "hand-over", "fallback"}
        ``"fused"`` only if no part of the call was left to PyTorch.
    reason : str
        Why PyTorch ran, empty on the fused path.
    text : str
        What `pycutfuse.explain` says, with `reason` before it.
    """

    path: str
    reason: str
    text: str


def observe(module: nn.Module, inputs: Sequence[Tensor]) -> Route:
    """Call `module` once without gradients and say what ran, by `explain` and by the counters."""
    with torch.no_grad():
        try:
            explanation = explain(module, *inputs)
            path, reason, text = explanation.path, explanation.reason or "", str(explanation)
        except TypeError:  # a module that explain does not know: the counters say enough
            path, reason, text = FUSED, "", type(module).__name__
        found, why = detours(lambda: module(*inputs))
    if found != FUSED and path == FUSED:
        return Route(found, why, f"{found} ({why})\n{text}")
    return Route(path, reason, text)


def detours(call: Callable[[], object]) -> tuple[str, str]:
    """Path of a call by the counters, and why PyTorch ran if it did."""
    before = counters()
    call()
    after = counters()
    for kind, path in (("fallback", FALLBACK), ("handover", HAND_OVER)):
        old, new = before[kind], after[kind]
        reasons = [reason for reason, count in new.items() if count > old.get(reason, 0)]
        if reasons:
            return path, "; ".join(reasons)
    return FUSED, ""
