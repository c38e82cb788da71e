"""Errors against float64: two measures, and the rule that compares them with torch's."""

from dataclasses import dataclass

import torch
from torch import Tensor

IEEE_FLOOR = 2.0**-22
# Unit roundoff of what is multiplied, for each dtype and tier.
_FLOORS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, "ieee": IEEE_FLOOR, "tf32": 2.0**-10}


def floor_of(dtype: torch.dtype, tier: str = "ieee") -> float:
    """Error below which torch's own is not asked for; `tier` is read for float32.

    Examples
    --------
    >>> floor_of(torch.bfloat16) == 2**-8
    True
    """
    return _FLOORS[tier if dtype is torch.float32 else dtype]


def kinds(tensor: Tensor) -> Tensor:
    """0 finite, 1 NaN, 2 and 3 infinities by sign: what must agree with torch, place by place.

    Examples
    --------
    >>> import torch
    >>> kinds(torch.tensor([1.0, float("nan"), float("inf"), -float("inf")]))
    tensor([0, 1, 2, 3], dtype=torch.uint8)
    """
    kind = torch.zeros(tensor.shape, dtype=torch.uint8, device=tensor.device)
    kind[tensor.isnan()] = 1
    kind[tensor == float("inf")] = 2
    kind[tensor == float("-inf")] = 3
    return kind


@dataclass(frozen=True)
class ErrorPair:
    """Two relative errors of one result.

    Attributes
    ----------
    frobenius : float
        ``|C - C64|_F / |C64|_F``.
    scaled : float
        ``max |C - C64| / (|A| |B|)``, element by element; NaN where no bound was given.
    """

    frobenius: float
    scaled: float


def errors(result: Tensor, exact: Tensor, bound: Tensor | None = None) -> ErrorPair:
    """Measure `result` against `exact`, its float64 value.

    Parameters
    ----------
    result : Tensor
        Any shape and dtype.
    exact : Tensor
        float64, of the same shape.
    bound : Tensor, optional
        ``|A| |B|`` in float64, of the same shape, by which each element's error is divided.

    Returns
    -------
    ErrorPair

    Examples
    --------
    >>> import torch
    >>> one = torch.ones(2, dtype=torch.float64)
    >>> errors(one.float(), one).frobenius
    0.0
    """
    difference = result.double() - exact
    scale = float(exact.norm())
    frobenius = float(difference.norm()) / (scale if scale > 0 else 1.0)
    scaled = float("nan")
    if bound is not None:
        smallest = torch.finfo(torch.float64).tiny
        scaled = (
            float((difference.abs() / bound.clamp_min(smallest)).max()) if bound.numel() else 0.0
        )
    return ErrorPair(frobenius, scaled)


def no_worse(ours: ErrorPair, theirs: ErrorPair, floor: float = IEEE_FLOOR) -> str | None:
    """Say which of our errors exceeds max(torch's in the same run, floor), None if neither does.

    Examples
    --------
    >>> no_worse(ErrorPair(1e-7, 1e-7), ErrorPair(0.0, 0.0)) is None
    True
    >>> no_worse(ErrorPair(1e-6, 1e-7), ErrorPair(5e-7, 0.0))
    'frobenius error 1.000e-06 exceeds max(torch 5.000e-07, floor 2.384e-07)'
    """
    for name in ("frobenius", "scaled"):
        own, other = getattr(ours, name), getattr(theirs, name)
        if own != own and other != other:
            continue
        if not own <= max(other, floor):
            return f"{name} error {own:.3e} exceeds max(torch {other:.3e}, floor {floor:.3e})"
    return None
