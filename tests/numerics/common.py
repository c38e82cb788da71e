"""float64 values of the operators, and torch's float32 errors beside ours."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from pycutfuse.testing import ErrorPair, errors


def exact_linear(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x @ weight.T and |x| @ |weight|.T in float64."""
    return x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T


def compare(
    ours: Tensor, theirs: Tensor, exact: Tensor, bound: Tensor | None = None
) -> tuple[ErrorPair, ErrorPair]:
    """Errors of our result and of torch's."""
    return errors(ours, exact, bound), errors(theirs, exact, bound)


@contextmanager
def torch_flag(tier: str) -> Iterator[None]:
    """torch's products at `tier`, whatever the flags of this process."""
    outer = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tier == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = outer


def torch_linear(x: Tensor, weight: Tensor, tier: str = "ieee") -> Tensor:
    """torch's linear at `tier`."""
    with torch_flag(tier):
        return F.linear(x, weight)
