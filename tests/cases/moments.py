"""Batch norm of 16-bit results whose columns are far from zero for their deviation."""

import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse.testing import generate, guarded

OFFSETS = [0.3, 100.3, -1500.3]


def check_statistics(m: int, n: int, offset: float, dtype: torch.dtype, device: str) -> None:
    """What is normalised is what was measured: a constant column is batch norm's bias."""
    k = 64
    x = generate("randn", (m, k), seed=1, device=device, dtype=dtype)
    weight = generate("randn", (n, k), seed=2, device=device, dtype=dtype)
    weight[7] = 0
    weight[8] *= 2.0**-12
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
    # Two of a column's values may be rounded to the neighbour: they are sums of another order.
    step = torch.finfo(dtype).eps * exact.abs().amax(0)  # between values, or more
    two = 2 * step / m
    check_running(mean, (exact.mean(0), rounded.mean(0)), 1e-6, two)
    two = two * (2 * exact.std(0) + step)
    check_running(var, (exact.var(0), rounded.var(0)), 1e-5, two)
    assert torch.equal(result[:, 7], shift[7].to(dtype).expand(m))
    # Columns as they are, and as PyTorch rounds them: of these is one or the other.
    error = torch.full_like(exact, torch.inf)
    for z in (exact, rounded):
        expected = F.batch_norm(z, None, None, None, shift.double(), training=True)
        error = error.minimum((result - expected).abs() / (1 + expected.abs()))
    close = 4 * torch.finfo(dtype).eps + 2 * step / exact.std(0).clamp(min=2 * step)
    assert (error <= close).all(), error.amax(0)


def check_extremes(m: int, dtype: torch.dtype, device: str) -> None:
    """Columns that are not finite, and some whose squares overflow."""
    n, k = 328, 64
    x = generate("randn", (m, k), seed=1, device=device, dtype=dtype)
    weight = generate("randn", (n, k), seed=2, device=device, dtype=dtype)
    offset = generate("rand", (n,), seed=3, device=device, dtype=dtype)
    weight[17, 3], weight[18, 5], offset[19] = torch.inf, torch.nan, torch.inf
    large = 2.0**62 if dtype == torch.bfloat16 else 2.0**10
    weight[40:44] *= large
    weight[44:48] *= 2.0**-12
    offset[44:48] = 32 * large  # and the columns are constant
    with guarded():
        result = pcf.ops.linear_batch_norm(x, weight, epilogue=(pcf.add(offset),), training=True)
    z = (F.linear(x.double(), weight.double()) + offset.double()).to(dtype).double()
    expected = F.batch_norm(z, None, None, training=True)
    finite = expected.isfinite()
    assert int((~finite.all(0)).sum()) == 3
    assert torch.equal(result.isfinite(), finite)
    close = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(result.double()[finite], expected[finite], rtol=close, atol=close)


def check_running(
    own: Tensor, exact: tuple[Tensor, ...], rtol: float, atol: Tensor | float = 0
) -> None:
    """It is ``exact``: of columns as they are, or as PyTorch rounds and measures them."""
    error = torch.stack([(own - one).abs() - rtol * one.abs() for one in exact]).amin(0)
    assert (error <= 1e-6 + atol).all(), error.amax()
