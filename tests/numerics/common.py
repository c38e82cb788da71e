"""float64 values of the operators, and torch's float32 errors beside ours."""

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


def torch_linear(x: Tensor, weight: Tensor) -> Tensor:
    """torch's linear at full float32, whatever the flags of this process."""
    outer = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return F.linear(x, weight)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = outer


def kinds(tensor: Tensor) -> Tensor:
    """0 finite, 1 NaN, 2 and 3 infinities by sign: what must agree with torch, place by place."""
    kind = torch.zeros(tensor.shape, dtype=torch.uint8, device=tensor.device)
    kind[tensor.isnan()] = 1
    kind[tensor == float("inf")] = 2
    kind[tensor == float("-inf")] = 3
    return kind
