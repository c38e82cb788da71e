"""Convolutions in float64, torch's at a tier, and their errors beside ours."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pycutfuse.testing import errors, floor_of, no_worse
from pycutfuse.testing.forcing import Kind

from ..cases.conv import ConvCase


@contextmanager
def conv_flag(tier: str) -> Iterator[None]:
    """torch's convolutions at `tier`, whatever the flags of this process."""
    outer = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = tier == "tf32"
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = outer


def torch_conv(case: ConvCase, *tensors: Tensor | None, tier: str) -> Tensor:
    """torch's convolution at `tier`."""
    with conv_flag(tier):
        return case.theirs(*tensors)


def wide(tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """In float64."""
    return [None if tensor is None else tensor.double() for tensor in tensors]


def bound_of(case: ConvCase, *tensors: Tensor | None) -> Tensor:
    """|x| * |weight| + |bias| in float64, by which each element's error is divided."""
    return case.theirs(*(None if one is None else one.abs() for one in wide(tensors)))


def check(
    ours: Tensor, theirs: Tensor, exact: Tensor, kind: Kind, bound: Tensor | None = None
) -> None:
    """Fail if our error exceeds max(torch's, the floor of `kind`)."""
    problem = no_worse(
        errors(ours, exact, bound), errors(theirs, exact, bound), floor=floor_of(*kind)
    )
    assert problem is None, problem
