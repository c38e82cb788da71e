"""Batch norm's statistics of bfloat16 results: of whole tiles those of rounded values."""

import torch
import torch.nn.functional as F

import pycutfuse as pcf
from pycutfuse.testing import generate, guarded

OFFSETS = [0.0, 100.0, -1500.0]


def check_statistics(m: int, offset: float, device: str) -> None:
    """Near zero and far from it, where squares of values themselves would not do."""
    n, k, dtype = 330, 64, torch.bfloat16
    x = generate("randn", (m, k), seed=1, device=device, dtype=dtype)
    weight = generate("randn", (n, k), seed=2, device=device, dtype=dtype)
    weight[7] = 0  # a constant column
    shift = generate("randn", (n,), seed=3, device=device)
    mean, var = torch.zeros(n, device=device), torch.zeros(n, device=device)
    with guarded():
        result = pcf.ops.linear_batch_norm(
            x,
            weight,
            epilogue=(pcf.add(offset),),
            running_mean=mean,
            running_var=var,
            bn_bias=shift,
            training=True,
            momentum=1.0,
        )
    exact = x.double() @ weight.double().T + offset
    rounded = exact.to(dtype).double()
    step = 2 * torch.finfo(dtype).eps * exact.abs().amax(0)  # between neighbours, or more
    assert ((mean - rounded.mean(0)).abs() <= step / 64 + 1e-6).all()
    # The last rows, fewer than a tile's, are not rounded before.
    slack = step**2 * (m % 64) / m / 4
    assert ((var - rounded.var(0)).abs() <= 2e-3 * rounded.var(0) + slack + 1e-6).all()
    assert float(var[7]) == 0.0
    assert torch.equal(result[:, 7], shift[7].to(dtype).expand(m))
    expected = F.batch_norm(rounded, None, None, None, shift.double(), training=True)
    deviation = exact.std(0).clamp(min=1e-3)
    assert ((result - expected).abs() <= 2e-2 * (1 + expected.abs()) + 2 * step / deviation).all()
