"""Linear layers under logsumexp are never less accurate than PyTorch, measured against float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pycutfuse as pcf
from pycutfuse.testing import DISTRIBUTIONS, IEEE_FLOOR, generate, guarded, kinds, no_worse

from ..cases.sizes import KERNEL, SizeCase
from .common import compare, torch_flag

pytestmark = pytest.mark.cuda

INF, NAN = float("inf"), float("nan")
FLOORS = {torch.float32: IEEE_FLOOR, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
TF32_FLOOR = 2.0**-10
Weights = tuple[Tensor, Tensor, Tensor, Tensor]


def one(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.logsumexp(F.linear(x, weight, bias), -1)


def two(x: Tensor, weight: Tensor, bias: Tensor, second: Tensor, second_bias: Tensor) -> Tensor:
    return one(torch.sigmoid(F.linear(x, weight, bias)), second, second_bias)


def module(weights: Weights) -> nn.Module:
    """LinearSigmoidLinearLogSumExp with these parameters."""
    (hidden, k), n = weights[0].shape, weights[2].shape[0]
    made = pcf.nn.LinearSigmoidLinearLogSumExp(k, hidden, n, device="meta")
    for child, weight, bias in (
        (made.linear1, *weights[:2]),
        (made.linear2, *weights[2:]),
    ):
        child.weight, child.bias = nn.Parameter(weight), nn.Parameter(bias)
    return made


def draw(distribution: str, k: int, hidden: int, n: int, device: torch.device) -> Weights:
    """Weights of nn.Linear's size, biases of size 1."""
    return (
        generate(distribution, (hidden, k), seed=2, device=device) / k**0.5,
        generate("randn", (hidden,), seed=3, device=device),
        generate(distribution, (n, hidden), seed=4, device=device) / hidden**0.5,
        generate("randn", (n,), seed=5, device=device),
    )


def check(
    ours: Tensor,
    chain: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    tier: str = "ieee",
    floor: float | None = None,
) -> None:
    """Fail if `ours` is further from float64 than torch's chain and the floor."""
    with torch_flag(tier), torch.no_grad():
        theirs = chain(*inputs)
        exact = chain(*(tensor.double() for tensor in inputs))
    problem = no_worse(*compare(ours, theirs, exact), floor=floor or FLOORS[ours.dtype])
    assert problem is None, problem


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("k", [64, 512, 4096, 16384])
def test_one_layer(distribution: str, k: int, cuda: torch.device, fused: None) -> None:
    x = generate(distribution, (1000, k), seed=1, device=cuda)
    weight, bias, *_ = draw(distribution, k, 777, 1, cuda)
    result = pcf.ops.linear_logsumexp(x, weight, bias, precision="ieee")
    check(result, one, (x, weight, bias))
    scaled = pcf.ops.linear_logsumexp(x, 20 * weight, bias, precision="ieee")
    check(scaled, one, (x, 20 * weight, bias))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4608, 4100), torch.float32), ((8192, 8200), torch.float16), ((16384, 10000), torch.float32)],
)
def test_columns_that_fill_no_group_of_tiles(
    shape: tuple[int, int], dtype: torch.dtype, cuda: torch.device, fused: None
) -> None:
    """The scheduler would pad groups of 4 with tiles that have no columns."""
    x = generate("randn", (shape[0], 64), seed=1, device=cuda).to(dtype)
    weight = (generate("randn", (shape[1], 64), seed=2, device=cuda) / 8).to(dtype)
    bias = generate("randn", (shape[1],), seed=3, device=cuda).to(dtype)
    bias[:128] += 20  # the first tile has the largest
    with guarded():
        result = pcf.ops.linear_logsumexp(x, weight, bias, precision="ieee")
    check(result, one, (x, weight, bias))


@pytest.mark.parametrize("size", KERNEL, ids=str)
@pytest.mark.parametrize("dtype", list(FLOORS))
def test_one_layer_of_every_size(
    size: SizeCase, dtype: torch.dtype, cuda: torch.device, fused: None
) -> None:
    x = generate("randn", (*size.leading, size.k), seed=1, device=cuda).to(dtype)
    weight = (generate("randn", (size.n, size.k), seed=2, device=cuda) / size.k**0.5).to(dtype)
    bias = generate("randn", (size.n,), seed=3, device=cuda).to(dtype)
    check(pcf.ops.linear_logsumexp(x, weight, bias, precision="ieee"), one, (x, weight, bias))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(
    "size", [(64, 64, 64, 64), (1000, 2048, 4096, 1024), (333, 129, 517, 65), (1, 100, 72, 1)]
)
@pytest.mark.parametrize("dtype", list(FLOORS))
def test_two_layers(distribution: str, size, dtype, cuda: torch.device, fused: None) -> None:
    m, *sizes = size
    x = generate(distribution, (m, sizes[0]), seed=1, device=cuda).to(dtype)
    weights = tuple(tensor.to(dtype) for tensor in draw(distribution, *sizes, cuda))
    with torch.no_grad(), pcf.precision("ieee"):
        check(module(weights)(x), two, (x, *weights))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_tf32_tier(distribution: str, cuda: torch.device, fused: None) -> None:
    x = generate(distribution, (1000, 512), seed=1, device=cuda)
    weights = draw(distribution, 512, 1024, 700, cuda)
    with torch.no_grad(), pcf.precision("tf32"):
        check(module(weights)(x), two, (x, *weights), "tf32", TF32_FLOOR)
        result = pcf.ops.linear_logsumexp(x, *weights[:2])
        check(result, one, (x, *weights[:2]), "tf32", TF32_FLOOR)


@pytest.mark.parametrize("offset", [-1e4, -300.0, -6.0, 100.0, 1e4])
def test_shifted_logits(offset: float, cuda: torch.device, fused: None) -> None:
    x = generate("randn", (1000, 512), seed=1, device=cuda)
    first, bias, second, second_bias = draw("randn", 512, 1024, 700, cuda)
    second_bias = second_bias + offset
    with torch.no_grad(), pcf.precision("ieee"):
        weights = (first, bias, second, second_bias)
        check(module(weights)(x), two, (x, *weights))
        pair = (first[:700], second_bias)
        check(pcf.ops.linear_logsumexp(x, *pair), one, (x, *pair))


@pytest.mark.parametrize("shift", [-100.0, -20.0, -12.0, 12.0, 100.0])
def test_saturated_sigmoids(shift: float, cuda: torch.device, fused: None) -> None:
    x = generate("randn", (1000, 512), seed=1, device=cuda)
    first, bias, second, second_bias = draw("randn", 512, 1024, 700, cuda)
    for weights in (
        (first, bias + shift, second, second_bias),
        (first * shift, bias, second, second_bias),
    ):
        with torch.no_grad(), pcf.precision("ieee"):
            check(module(weights)(x), two, (x, *weights))


@pytest.mark.parametrize("exponent", [-60, -20, 0, 20, 30])
def test_rows_of_extreme_range(exponent: int, cuda: torch.device, fused: None) -> None:
    """Logits from vanishing to where one exponential is all of the sum, row by row."""
    x = generate("randn", (1000, 512), seed=1, device=cuda)
    scales = torch.exp2(torch.linspace(-8, 8, 1000, device=cuda).round())[:, None]
    x = x * scales * 2.0**exponent
    weights = draw("randn", 512, 1024, 700, cuda)
    with torch.no_grad(), pcf.precision("ieee"):
        result, chain = pcf.ops.linear_logsumexp(x, *weights[:2]), module(weights)(x)
    for rows in (slice(0, 100), slice(450, 550), slice(900, 1000)):
        check(result[rows], one, (x[rows], *weights[:2]))
        check(chain[rows], two, (x[rows], *weights))


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_non_finite_inputs(which: int, value: float, count: int, cuda, fused: None) -> None:
    inputs = [generate("randn", (300, 130), seed=1, device=cuda), *draw("randn", 130, 96, 70, cuda)]
    at = torch.randint(inputs[which].numel(), (count,), generator=torch.Generator().manual_seed(1))
    inputs[which].view(-1)[at.to(cuda)] = value
    x, *weights = inputs
    with torch.no_grad(), pcf.precision("ieee"), torch_flag("ieee"):
        pairs = [(module(tuple(weights))(x), two(x, *weights))]
        pairs.append((pcf.ops.linear_logsumexp(x, *weights[:2]), one(x, *weights[:2])))
    for ours, theirs in pairs:
        assert torch.equal(kinds(ours), kinds(theirs))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_infinite_logits(cuda: torch.device, fused: None) -> None:
    x = generate("randn", (300, 130), seed=1, device=cuda)
    weight = generate("randn", (70, 130), seed=2, device=cuda)
    full = torch.zeros(300, 70, device=cuda)
    full[0], full[1], full[2, 5], full[3, :69] = -INF, INF, INF, -INF
    full[4, 3], full[4, 4], full[5, 6], full[6] = INF, -INF, NAN, 1e30
    with pcf.precision("ieee"), torch_flag("ieee"):
        ours = pcf.ops.linear_logsumexp(x, weight, epilogue=(pcf.add(full),))
        theirs = torch.logsumexp(F.linear(x, weight) + full, -1)
    assert torch.equal(kinds(ours), kinds(theirs))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_gradients(distribution: str, offset: float, cuda: torch.device, fused: None) -> None:
    x = generate(distribution, (700, 512), seed=1, device=cuda)
    first, bias, second, second_bias = draw("randn", 512, 384, 300, cuda)
    second_bias = second_bias + offset
    grad = generate("randn", (700,), seed=6, device=cuda)
    inputs = [tensor.requires_grad_() for tensor in (x, first, bias, second, second_bias)]
    made = module(tuple(inputs[1:]))
    parameters = list(made.parameters())
    with pcf.precision("ieee"), torch_flag("ieee"):
        ours = torch.autograd.grad(made(x), [x, *parameters], grad)
        theirs = torch.autograd.grad(two(*inputs), inputs, grad)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = torch.autograd.grad(two(*wide), wide, grad.double())
    for mine, other, value in zip(ours, theirs, exact, strict=True):
        mine, other = compare(mine, other, value)
        # Where both are bound by the rounding of the same logits, they tie.
        assert mine.frobenius <= max(1.1 * other.frobenius, IEEE_FLOOR)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_16_bit_tensors(dtype: torch.dtype, cuda: torch.device, fused: None) -> None:
    weights = [tensor.to(dtype) for tensor in draw("randn", 512, 384, 300, cuda)]
    x = generate("randn", (700, 512), seed=1, device=cuda).to(dtype)
    inputs = [tensor.requires_grad_() for tensor in (x, *weights)]
    made = module(tuple(inputs[1:]))
    ours = torch.autograd.grad(made(x).sum(), [x, *made.parameters()])
    theirs = torch.autograd.grad(two(*inputs).sum(), inputs)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = torch.autograd.grad(two(*wide).sum(), wide)
    for mine, other, value in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == dtype
        mine, other = compare(mine, other, value)
        assert mine.frobenius <= max(1.1 * other.frobenius, FLOORS[dtype])
