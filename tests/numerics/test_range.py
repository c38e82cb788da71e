"""Infinities, NaNs, tiny and huge values: the same kind of result in the same place as torch's."""

import pytest
import torch
import torch.nn.functional as F

import pycutfuse as pcf
from pycutfuse.program import encode
from pycutfuse.reference import apply_program
from pycutfuse.testing import generate, kinds, no_worse

from .common import compare, exact_linear, torch_linear

pytestmark = pytest.mark.cuda

INF, NAN = float("inf"), float("nan")


def data(cuda: torch.device, m: int = 300, n: int = 200, k: int = 130):
    x = generate("randn", (m, k), seed=1, device=cuda)
    return x, generate("randn", (n, k), seed=2, device=cuda)


@pytest.mark.parametrize("where", ["x", "weight", "both"])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_non_finite_inputs(
    where: str, value: float, count: int, cuda: torch.device, fused: None
) -> None:
    x, weight = data(cuda)
    generator = torch.Generator().manual_seed(count)
    for tensor in (x, weight):
        if where == "both" or tensor is (x if where == "x" else weight):
            at = torch.randint(tensor.numel(), (count,), generator=generator).to(cuda)
            tensor.view(-1)[at] = value
    ours, theirs = pcf.ops.linear(x, weight), torch_linear(x, weight)
    assert torch.equal(kinds(ours), kinds(theirs))
    finite = theirs.isfinite()
    torch.testing.assert_close(ours[finite], theirs[finite], rtol=1e-4, atol=1e-4)


def test_infinities_that_meet(cuda: torch.device, fused: None) -> None:
    x, weight = data(cuda)
    x[0, :2] = torch.tensor([INF, INF])
    x[1, :2] = torch.tensor([INF, -INF])
    weight[:50, :2] = 1.0
    weight[50, 0] = 0.0
    ours, theirs = pcf.ops.linear(x, weight), torch_linear(x, weight)
    assert torch.equal(kinds(ours), kinds(theirs))


def test_all_rows_non_finite(cuda: torch.device, fused: None) -> None:
    x, weight = data(cuda)
    x[:, 7] = NAN
    assert bool(pcf.ops.linear(x, weight).isnan().all())


@pytest.mark.parametrize(
    "step", [pcf.relu(), pcf.clamp(-1.0, 1.0), pcf.sigmoid(), pcf.maximum(0.0)]
)
def test_non_finite_values_in_programs(step, cuda: torch.device, fused: None) -> None:
    x, weight = data(cuda)
    x[3, 4], x[5, 6], x[7, 8] = INF, -INF, NAN
    ours = pcf.ops.linear(x, weight, epilogue=(step,))
    program = encode((step,))
    theirs = apply_program(torch_linear(x, weight), program.codes, program.constants, [])
    assert torch.equal(kinds(ours), kinds(theirs))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("training", [True, False])
def test_non_finite_columns_of_a_batch_norm(
    training: bool, cuda: torch.device, fused: None
) -> None:
    x, weight = data(cuda)
    weight[5, 3] = INF
    weight[9, 3] = NAN
    mean, var = torch.zeros(200, device=cuda), torch.ones(200, device=cuda)
    stats = {} if training else {"running_mean": mean, "running_var": var}
    ours = pcf.ops.linear_batch_norm(x, weight, training=training, **stats)
    z = torch_linear(x, weight)
    theirs = F.batch_norm(z, *(stats.values() or (None, None)), training=training)
    assert torch.equal(kinds(ours), kinds(theirs))


@pytest.mark.parametrize("exponent", [-120, -60, -30, 0, 30, 60])
def test_rows_of_any_magnitude(exponent: int, cuda: torch.device, fused: None) -> None:
    x, weight = data(cuda)
    scales = torch.exp2(torch.linspace(-6, 6, 300, device=cuda).round())[:, None]
    x = x * scales * 2.0**exponent
    ours, theirs = pcf.ops.linear(x, weight), torch_linear(x, weight)
    exact, bound = exact_linear(x, weight)
    pair = compare(ours, theirs, exact, bound)
    assert no_worse(*pair) is None, no_worse(*pair)
    for rows in (slice(0, 10), slice(290, 300)):  # small rows are as accurate as large ones
        pair = compare(ours[rows], theirs[rows], exact[rows])
        assert no_worse(*pair) is None, no_worse(*pair)


def test_overflow_and_underflow_as_torch(cuda: torch.device, fused: None) -> None:
    x, weight = torch.zeros(8, 64, device=cuda), torch.zeros(8, 64, device=cuda)
    x[0, 0], weight[0, 0] = 3e38, 3e38  # the product overflows
    x[1, 0], weight[1, 0] = 1e-30, 1e-30  # and this one vanishes
    x[2, 0] = 3e38
    weight[2, 1] = 1e-40
    ours, theirs = pcf.ops.linear(x, weight), torch_linear(x, weight)
    assert torch.equal(kinds(ours), kinds(theirs))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-37, equal_nan=True)


def test_zero_rows(cuda: torch.device, fused: None) -> None:
    x, weight = data(cuda)
    x[::2] = 0
    weight[1::2] = 0
    ours = pcf.ops.linear(x, weight)
    assert bool((ours[::2] == 0).all())
    assert bool((ours[:, 1::2] == 0).all())
    torch.testing.assert_close(ours, torch_linear(x, weight), rtol=1e-5, atol=1e-5)


def test_two_to_the_31_elements(cuda: torch.device, fused: None) -> None:
    m, n, k = 2**16 + 1, 2**15, 64
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * 4 * m * n:
        pytest.skip(f"needs a GPU with {3 * 4 * m * n >> 30} GiB free")
    x = generate("randn", (m, k), seed=1, device=cuda)
    weight = generate("randn", (n, k), seed=2, device=cuda)
    result = pcf.ops.linear(x, weight, epilogue=(pcf.mul(2.0),))
    assert result.numel() > 2**31
    for rows in (slice(0, 64), slice(m // 2, m // 2 + 64), slice(m - 65, m)):
        exact = 2 * (x[rows].double() @ weight.double().T)
        torch.testing.assert_close(result[rows].double(), exact, rtol=1e-4, atol=1e-5)
    del result
    normal = pcf.ops.linear_batch_norm(x, weight, training=True)
    part = slice(n - 64, n)
    z = x.double() @ weight[part].double().T
    exact = F.batch_norm(z, None, None, training=True)
    torch.testing.assert_close(normal[:, part].double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tier", ["ieee", "tf32"])
@pytest.mark.parametrize(
    ("x_size", "weight_size", "factors"),
    [(1e17, 1e17, (1e9, 1e-9)), (1e19, 1e20, (0.0, 1.0)), (2.0**70, 2.0**-70, (2.0, 0.5))],
)
def test_steps_that_are_folded_overflow_where_torchs_do(
    x_size: float, weight_size: float, factors, tier: str, cuda: torch.device, fused: None
) -> None:
    x, weight = (one.abs() for one in data(cuda))
    x, weight = x * x_size, weight * weight_size
    steps = tuple(pcf.mul(factor) for factor in factors)
    value = F.linear(x, weight)
    for factor in factors:
        value = value * factor
    ours = pcf.ops.linear(x, weight, epilogue=steps, precision=tier)
    assert torch.equal(kinds(ours), kinds(value))
