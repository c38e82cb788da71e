"""Batch norm of 16-bit results whose columns are far from zero for their deviation."""

import torch
import torch.nn.functional as F

import pycutfuse as pcf
from pycutfuse.testing import generate, guarded

OFFSETS = [0.3, 100.3, -1500.3]


def check_statistics(m: int, offset: float, dtype: torch.dtype, device: str) -> None:
    """What is normalised is what was measured: a constant column is batch norm's bias."""
    n, k = 330, 64
    x = generate("randn", (m, k), seed=1, device=device, dtype=dtype)
    weight = generate("randn", (n, k), seed=2, device=device, dtype=dtype)
    weight[7] = 0
    weight[8] *= 2.0**-12
    shift = generate("randn", (n,), seed=3, device=device)
    with guarded():
        result = pcf.ops.linear_batch_norm(
            x, weight, epilogue=(pcf.add(offset),), bn_bias=shift, training=True
        )
    exact = x.double() @ weight.double().T + offset
    assert torch.equal(result[:, 7], shift[7].to(dtype).expand(m))
    # Columns as they are, and as PyTorch rounds them: of these is one or the other.
    error = torch.full_like(exact, torch.inf)
    for z in (exact, exact.to(dtype).double()):
        expected = F.batch_norm(z, None, None, None, shift.double(), training=True)
        error = error.minimum((result - expected).abs() / (1 + expected.abs()))
    step = 2 * torch.finfo(dtype).eps * exact.abs().amax(0)  # between values, or more
    close = 4 * torch.finfo(dtype).eps + step / exact.std(0).clamp(min=step)
    assert (error <= close).all(), error.amax(0)
