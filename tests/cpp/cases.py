"""One entry for each op: how to build it here and what torch calls it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A step (name and constants) and the torch function that it stands for."""

    step: tuple[Any, ...]
    function: Callable[[Tensor], Tensor]
    cancels: bool = False  # loses bits of v to cancellation, in torch's fp32 too

    def __str__(self) -> str:
        name, *constants = self.step
        return f"{name}{tuple(constants)}" if constants else str(name)


def _cases() -> list[Case]:
    made = [
        Case(("relu",), F.relu),
        Case(("sigmoid",), torch.sigmoid),
        Case(("tanh",), torch.tanh),
        Case(("gelu_erf",), F.gelu, cancels=True),
        Case(("gelu_tanh",), lambda v: F.gelu(v, approximate="tanh"), cancels=True),
        Case(("silu",), F.silu),
        Case(("mish",), F.mish),
        Case(("hardswish",), F.hardswish, cancels=True),
        Case(("clamp", -1.0, 2.0), lambda v: torch.clamp(v, -1.0, 2.0)),
        Case(("clamp", 2.0, -1.0), lambda v: torch.clamp(v, 2.0, -1.0)),
        Case(("clamp", 0.0, 6.0), lambda v: torch.clamp(v, 0.0, 6.0)),
        Case(("clamp", -3.0, float("inf")), lambda v: torch.clamp(v, min=-3.0)),
        Case(("softplus", 1.0, 20.0), F.softplus),
        Case(("softplus", 2.0, 20.0), lambda v: F.softplus(v, 2.0, 20.0)),
        Case(("softplus", -0.5, 20.0), lambda v: F.softplus(v, -0.5, 20.0)),
        Case(("softplus", 1.0, 0.0), lambda v: F.softplus(v, 1.0, 0.0)),
    ]
    for slope in (0.01, -0.5, 0.0):
        made.append(Case(("leaky_relu", slope), lambda v, a=slope: F.leaky_relu(v, a)))
    for bound in (3.0, 0.0, float("-inf")):
        made.append(Case(("minimum", bound), lambda v, a=bound: torch.clamp(v, max=a)))
        made.append(Case(("maximum", bound), lambda v, a=bound: torch.clamp(v, min=a)))
    for constant in (0.75, -3.0, 0.0, 1e-38, float("inf")):
        # A 1-dim tensor, since torch rounds a Python scalar of division to its reciprocal.
        other = torch.tensor([constant])
        made.append(Case(("add", constant), lambda v, o=other: v + o.to(v.dtype)))
        made.append(Case(("sub", constant), lambda v, o=other: v - o.to(v.dtype)))
        made.append(Case(("mul", constant), lambda v, o=other: v * o.to(v.dtype)))
        made.append(Case(("div", constant), lambda v, o=other: v / o.to(v.dtype)))
    return made


CASES = _cases()
