"""Layers that are turned over: what is drawn, run on a device and compared with float64."""

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse.testing import (
    exact_promotion,
    forced_policy,
    generate,
    guarded,
    integers,
    kinds,
    turned_policy,
)

from . import moments

INF, NAN = float("inf"), float("nan")
# (M, N, K): parts of tiles, of pairs and of sectors; several tiles along both.
SIZES = [(300, 200, 460), (65, 17, 64), (1, 1, 64), (257, 129, 68), (520, 258, 132)]
# Of 16 bits rows of the result are whole vectors.
NARROW = [torch.float16, torch.bfloat16]
NARROW_SIZES = [(300, 200, 456), (65, 16, 64), (1, 8, 64), (257, 136, 72), (520, 264, 130)]


def linear(x: Tensor, weight: Tensor, *bias: Tensor, steps: tuple[pcf.Step, ...] = ()) -> Tensor:
    """By the kernel of x's dtype, with outputs poisoned and guarded."""
    with forced_policy(turned_policy(dtype=x.dtype)), exact_promotion(), guarded():
        result: Tensor = pcf.ops.linear(x, weight, *bias, epilogue=steps, precision="tf32")
    return result


def check_narrow(size: tuple[int, int, int], raster: int, device: str, dtype: torch.dtype) -> None:
    """Whole numbers of 16 bits: exact before they are rounded, once, to the result."""
    m, n, k = size
    x, weight = (integers((rows, k), seed=rows, device=device).to(dtype) for rows in (m, n))
    bias, vector = (integers((n,), seed=i, device=device).to(dtype) for i in (3, 4))
    sums = (x.double() @ weight.double().T + bias.double()) * vector.double() - 2
    rounded = sums.float().to(dtype)
    for last, expected in ((None, rounded), (pcf.relu(), rounded.relu()), (pcf.sigmoid(), None)):
        steps = (pcf.mul(vector), pcf.sub(2.0), *([] if last is None else [last]))
        with forced_policy(turned_policy(raster, dtype)), guarded():
            result = pcf.ops.linear(x, weight, bias, epilogue=steps)
        if expected is not None:
            assert torch.equal(result, expected)
        else:
            exact = sums.float().sigmoid()
            tiny = 2.0**-25 if dtype is torch.float16 else 1e-30
            assert ((result.float() - exact).abs() <= 2.0**-8 * exact + tiny).all()
    full = integers((m, n), seed=5, device=device).to(dtype)  # not per channel: straight
    exact = x.double() @ weight.double().T + full.double()
    assert torch.equal(linear(x, weight, steps=(pcf.add(full),)), exact.float().to(dtype))


def check_whole_numbers(size: tuple[int, int, int], device: str) -> None:
    """Of a weight that is contiguous, and then by the same plan of one with longer rows."""
    m, n, k = size
    x, wide = (integers((s, k + 8), seed=s, device=device) for s in (m, n + 1))
    bias, vector = (integers((n,), seed=i, device=device) for i in (3, 4))
    steps = (pcf.mul(vector), pcf.sub(2.0), pcf.relu())
    for weight in (wide[1:, :k].contiguous(), wide[1:, 4 : k + 4]):
        result = linear(x[:, 3 : k + 3], weight, bias, steps=steps)
        sums = x[:, 3 : k + 3].double() @ weight.double().T + bias.double()
        assert torch.equal(result, (sums * vector.double() - 2).relu().float())


def check_others_are_straight(device: str) -> None:
    """What the copy engine does not bring, and beside an operand as large as the result."""
    m, n, k = 70, 40, 128
    x, full = integers((m, k), seed=1, device=device), integers((m, n), seed=3, device=device)
    weight = integers((n, k + 1), seed=2, device=device)
    turned = weight[:, :k].contiguous()
    shifted = torch.empty(n * k + 1, device=device)[1:].view(n, k).copy_(turned)
    for one in (weight[:, :k], turned.T.contiguous().T, shifted):
        assert torch.equal(linear(x, one), (x.double() @ one.double().T).float())
    expected = x.double() @ turned.double().T + full.double()
    assert torch.equal(linear(x, turned, steps=(pcf.add(full),)), expected.float())


def check_ranges(device: str) -> None:
    """Rows whose first 64 elements say little of the others, and magnitudes near fp32's ends."""
    m, n, k = 40, 100, 260
    x = generate("randn", (m, k), seed=1, device=device)
    weight = generate("randn", (n, k), seed=2, device=device)
    weight[0, :64] = 0
    weight[1, :64] *= 2.0**-12
    weight[2, 64:] *= 2.0**-12
    weight[3] *= 2.0**-118
    weight[4] *= 2.0**118
    weight[5] = 0
    weight[6, :64], weight[6, 64:] = 0, weight[6, 64:] * 2.0**30
    weight[16:32, :64] = 0
    x[1] *= 2.0**-60
    x[2] *= 2.0**3
    result = linear(x, weight).double()
    terms = x.double() @ weight.double().T
    size = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    # Sums that fp32 holds as subnormal numbers keep fewer bits.
    assert ((result - terms).abs() <= size * 2.0**-11 + 2.0**-149).all()


def check_not_finite(device: str, dtype: torch.dtype = torch.float32) -> None:
    """Exactly where PyTorch's is."""
    m, n, k = 150, 140 if dtype is torch.float32 else 144, 132
    x = generate("randn", (m, k), seed=1, device=device).to(dtype)
    weight = generate("randn", (n, k), seed=2, device=device).to(dtype)
    x[3, 5], x[70, 131], x[71] = INF, NAN, 0
    weight[4, 100], weight[130, 0], weight[7, 5] = -INF, NAN, 0
    bias = generate("randn", (n,), seed=3, device=device).to(dtype)
    bias[9] = INF
    assert torch.equal(kinds(linear(x, weight, bias)), kinds(F.linear(x, weight, bias)))


def check_batch_norm(
    training: bool, factor: float, device: str, dtype: torch.dtype = torch.float32
) -> None:
    """A factor of 2^42 is not folded, so that steps run one by one."""
    m, n, k = 300, 270 if dtype is torch.float32 else 272, 100
    x = generate("randn", (m, k), seed=1, device=device).to(dtype)
    weight = generate("rand", (n, k), seed=2, device=device).to(dtype)
    bias, *norm = (generate("randn", (n,), seed=3 + i, device=device) for i in range(3))
    mean, var = bias.clone(), generate("rand", (n,), seed=9, device=device) + 0.5
    up = torch.ones(n, device=device)
    up[200] = factor
    up, bias = up.to(dtype), bias.to(dtype)
    exact = [one.double() for one in (mean, var)]
    steps = (*3 * (pcf.mul(up),), *3 * (pcf.mul(1 / up),), pcf.add(bias))
    with forced_policy(turned_policy(dtype=dtype)), guarded():
        result = pcf.ops.linear_batch_norm(
            x, weight, epilogue=steps, bn_weight=norm[0], bn_bias=norm[1], running_mean=mean,
            running_var=var, training=training, momentum=0.25, precision="tf32",
            after=(pcf.relu(),),
        )  # fmt: skip
    z = x.double() @ weight.double().T + bias.double()
    terms = [one.double() for one in norm]
    expected = F.batch_norm(z, *exact, *terms, training, 0.25).relu()
    rounding = 1e-3 if dtype is torch.float32 else 2.0**-7
    assert (result.double() - expected).norm() <= rounding * expected.norm()
    for own, value in zip((mean, var), exact, strict=True):
        torch.testing.assert_close(own.double(), value, rtol=2e-3, atol=2e-3)


def check_moments(m: int, offset: float, device: str, dtype: torch.dtype) -> None:
    """Of rows whose blocks exchange them, or of more, for which a pass measures some anew."""
    with forced_policy(turned_policy(dtype=dtype)):
        moments.check_statistics(m, 328, offset, dtype, device)
        if m > 1024:
            moments.check_extremes(m, dtype, device)


def check_logsumexp(size: tuple[int, int, int], device: str, dtype: torch.dtype) -> None:
    """Of logits that are small, that are large in some rows and of some features, and infinite."""
    m, n, k = size
    x = generate("randn", (m, k), seed=1, device=device).to(dtype)
    weight = (generate("randn", (n, k), seed=2, device=device) / k**0.5).to(dtype)
    zeros = torch.zeros(n, dtype=dtype, device=device)
    steep = x.clone()
    steep[::3] *= 64  # what is subtracted differs from row to row
    shifts = [zeros, zeros + 1000, zeros - 1000, zeros.clone(), zeros.clone(), zeros.clone()]
    shifts[3][n // 2 :] = -300  # whole warps of small and of large logits
    shifts[4][: n // 2], shifts[5][n // 3 :] = -INF, 100
    rounding = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11
    ends = [((), Tensor.clone), ((pcf.relu(),), F.relu), ((pcf.sigmoid(),), F.sigmoid)]
    ends = 2 * ends + 2 * [*ends[1:], ends[0]]
    for (rows, bias), (last, end) in zip(product((x, steep), shifts), ends, strict=True):
        steps = (pcf.add(bias), *last)
        with forced_policy(turned_policy(dtype=dtype)), guarded():
            result = pcf.ops.linear_logsumexp(rows, weight, epilogue=steps)
        logits = end(rows.double() @ weight.double().T + bias.double())
        expected = logits.logsumexp(-1)
        close = rounding * expected.abs() + 1e-5 * logits.clamp(min=-1e9).abs().amax(-1)
        assert ((result.double() - expected).abs() <= close).all()
    for value in (INF, -INF, NAN):
        bad = x.clone()
        bad[m // 2, 3] = value
        with forced_policy(turned_policy(dtype=dtype)):
            result = pcf.ops.linear_logsumexp(bad, weight, shifts[4])
        assert torch.equal(kinds(result), kinds(F.linear(bad, weight, shifts[4]).logsumexp(-1)))
    full = generate("randn", (m, n), seed=3, device=device).to(dtype)  # not per channel: straight
    with forced_policy(turned_policy(dtype=dtype)), guarded():
        result = pcf.ops.linear_logsumexp(x, weight, epilogue=(pcf.add(full),))
    expected = (x.double() @ weight.double().T + full.double()).logsumexp(-1)
    torch.testing.assert_close(result.double(), expected, rtol=rounding, atol=1e-4)
    nothing = pcf.ops.linear_logsumexp(x, weight, zeros - INF)
    assert (nothing == -INF).all()
