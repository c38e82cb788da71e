"""1x1 convolutions of NCHW images as they are: exact, accurate, within their memory."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse._loader import native
from pycutfuse.testing import (
    exact_promotion,
    forced_conv_policy,
    generate,
    guarded,
    integers,
    kinds,
)
from pycutfuse.testing.forcing import Kind

from ..cases.conv import ConvCase, laid_out
from .conv_common import bound_of, check, conv_flag, torch_conv, wide

pytestmark = pytest.mark.cuda
CASES = [
    ConvCase(64, 256, (1, 1), (14, 14), 3),
    ConvCase(136, 40, (1, 1), (10, 10), 5, bias=False),
    ConvCase(72, 200, (1, 1), (5, 8), None),
    ConvCase(1024, 67, (1, 1), (28, 28), 2),
    ConvCase(256, 100, (1, 1), (2, 2), 129),
    ConvCase(104, 1, (1, 1), (32, 4), 2),
    ConvCase(2048, 96, (1, 1), (20, 20), 2),
    # Planes that do not end on 16 bytes.
    ConvCase(512, 200, (1, 1), (7, 7), 5),
    ConvCase(72, 130, (1, 1), (6, 7), None),
    ConvCase(136, 64, (1, 1), (3, 1), 70, bias=False),
    ConvCase(1032, 40, (1, 1), (15, 15), 3),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(params=["tf32", "ieee"])
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def kind_of(tier: str) -> Kind:
    return torch.float32, tier


@pytest.fixture(autouse=True)
def in_planes() -> Iterator[None]:
    binding = native().binding
    with forced_conv_policy(binding.ConvPolicy(0, gemm=binding.GemmPolicy(0, 0, source=2))):
        yield


def drawn(case: ConvCase, kind: str = "randn") -> tuple[Tensor, Tensor, Tensor | None]:
    return case.draw(lambda shape, seed: generate(kind, shape, seed=seed), device="cuda")


def whole(shape: tuple[int, ...], seed: int) -> Tensor:
    return integers(shape, seed=seed)


@every_case
def test_whole_numbers_are_exact(case: ConvCase, tier: str, fused: None) -> None:
    tensors = case.draw(whole, device="cuda")
    value = case.theirs(*wide(tensors))
    full = whole(value.shape, 4).cuda()
    vector = whole((case.out_channels, 1, 1), 5).cuda()
    for residual in (full, laid_out(full, "channels_last")):
        steps = (pcf.mul(vector), pcf.add(residual), pcf.relu())
        with exact_promotion(), guarded():
            result = case.ours(*tensors, epilogue=steps, precision=tier)
        assert torch.equal(result, (value * vector + full).relu().float())
        assert result.stride() == case.theirs(*tensors).stride()


@pytest.mark.parametrize("draw", ["randn", "rand", "lognormal"])
@every_case
def test_accuracy(draw: str, case: ConvCase, tier: str, fused: None) -> None:
    tensors = drawn(case, draw)
    exact, bound = case.theirs(*wide(tensors)), bound_of(case, *tensors)
    theirs = torch_conv(case, *tensors, tier=tier)
    check(case.ours(*tensors, precision=tier), theirs, exact, kind_of(tier), bound)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_batch_norm_in_eval(residual: bool, case: ConvCase, tier: str, fused: None) -> None:
    tensors, features = drawn(case), case.out_channels
    running = generate("randn", (features,), seed=5), generate("rand", (features,), seed=6) + 0.5
    mean, var = (one.cuda() for one in running)
    beside = generate("randn", (case.batch, features, *case.size), seed=7).cuda()
    beside = beside if residual else torch.zeros_like(beside)
    with guarded():
        result = pcf.ops.conv2d_batch_norm(
            *tensors,
            running_mean=mean,
            running_var=var,
            after=(pcf.add(beside), pcf.relu()) if residual else (pcf.relu(),),
            precision=tier,
        )
    exact = F.batch_norm(case.theirs(*wide(tensors)), mean.double(), var.double())
    theirs = F.batch_norm(torch_conv(case, *tensors, tier=tier), mean, var)
    check(result, (theirs + beside).relu(), (exact + beside.double()).relu(), kind_of(tier))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@every_case
def test_non_finite_values_stay_in_their_pixel(
    bad: float, case: ConvCase, tier: str, fused: None
) -> None:
    x, weight, bias = drawn(case)
    for at in (0, -1):
        spoilt = x.clone()
        spoilt[(at,) * x.dim()] = bad
        theirs = case.theirs(*wide((spoilt, weight, bias)))
        ours = case.ours(spoilt, weight, bias, precision=tier)
        assert torch.equal(kinds(ours), kinds(theirs))
        ours = case.ours(spoilt, weight, bias, epilogue=(pcf.relu(),), precision=tier)
        assert torch.equal(kinds(ours), kinds(theirs.relu()))
        spoilt = weight.clone()
        spoilt[at, at] = bad
        ours = case.ours(x, spoilt, bias, precision=tier)
        assert torch.equal(kinds(ours), kinds(case.theirs(*wide((x, spoilt, bias)))))


def test_the_largest_values_stay_finite(tier: str, fused: None) -> None:
    x = torch.zeros(2, 64, 4, 4, device="cuda")
    weight = torch.zeros(8, 64, 1, 1, device="cuda")
    largest = torch.finfo(torch.float32).max
    for one, other in ((x, weight), (weight, x)):
        x.zero_(), weight.zero_()
        one[:, 3] = largest
        other[:, 3] = 0.5
        result = pcf.ops.conv2d(x, weight, precision=tier)
        torch.testing.assert_close(result, torch.full_like(result, largest / 2), rtol=5e-4, atol=0)


@pytest.mark.parametrize(("channels", "size"), [(65, 6), (77, 6), (130, 6), (68, 5), (84, 9)])
def test_other_numbers_of_channels_at_ieee(channels: int, size: int, fused: None) -> None:
    case = ConvCase(channels, 50, (1, 1), (size, size), 4)
    tensors = drawn(case, "lognormal")
    exact, bound = case.theirs(*wide(tensors)), bound_of(case, *tensors)
    theirs = torch_conv(case, *tensors, tier="ieee")
    with guarded():
        ours = case.ours(*tensors, precision="ieee")
    check(ours, theirs, exact, kind_of("ieee"), bound)


def test_magnitudes_of_every_size_at_ieee(fused: None) -> None:
    """Pixels from denormal to nearly too large, whose channels begin or end with small ones."""
    pixels, channels, features = 128, 160, 72
    x = generate("randn", (4, channels, 4, 8), seed=1).double()
    sizes = torch.logspace(-44, 38, pixels, dtype=torch.float64)
    x *= sizes[torch.randperm(pixels, generator=torch.Generator().manual_seed(2))].view(4, 1, 4, 8)
    x[1, :64] *= 1e-20
    x[2, 96:] *= 1e-20
    x[3, :, 0] = 0
    rows = torch.logspace(-36, 30, features, dtype=torch.float64)
    weight = generate("randn", (features, channels, 1, 1), seed=3) * rows.view(-1, 1, 1, 1)
    x, weight = x.float().cuda(), weight.float().cuda()
    exact = F.conv2d(x.double(), weight.double())
    bound = F.conv2d(x.double().abs(), weight.double().abs())
    with guarded():
        ours = pcf.ops.conv2d(x, weight, precision="ieee")
    fits = bound < torch.finfo(torch.float32).max
    error = (ours.double() - exact).abs()
    # Each product of a sum may be rounded to a denormal.
    excess = (error / (2**-21 * bound + channels * 2**-149))[fits]
    assert excess.max() <= 1, excess.topk(9)
    assert fits.double().mean() > 0.5


@every_case
def test_at_any_address(case: ConvCase, tier: str, fused: None) -> None:
    x, weight, bias = drawn(case)
    expected = case.ours(x, weight, bias, precision=tier)

    def moved(tensor: Tensor, shift: int) -> Tensor:
        arena = tensor.new_full((tensor.numel() + shift,), float("nan"))
        return arena[shift:].view(tensor.shape).copy_(tensor)

    for shifts in ((0, 1), (3, 0), (4, 2), (4, 8)):
        tensors = [moved(one, shift) for one, shift in zip((x, weight), shifts, strict=True)]
        with guarded():
            result = case.ours(*tensors, bias, precision=tier)
        assert torch.equal(result, expected)


def test_frozen_and_captured(tier: str, fused: None) -> None:
    layer = pcf.nn.Conv2d(64, 96, 1, device="cuda", precision=tier).eval()
    x = generate("randn", (3, 64, 14, 12), seed=1).cuda()
    with torch.no_grad():
        expected = layer(x)
        pcf.freeze(layer)
        assert torch.equal(layer(x), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = layer(x)
        for seed in (2, 3):
            x.copy_(generate("randn", x.shape, seed=seed))
            graph.replay()
            assert torch.equal(result, layer(x))


def test_gradients_are_those_of_torch(tier: str, fused: None) -> None:
    case = CASES[0]
    ours, theirs = ([one.requires_grad_() for one in drawn(case)] for _ in range(2))
    with conv_flag(tier):
        value = case.ours(*ours, epilogue=(pcf.relu(),))
        exact = case.theirs(*theirs).relu()
        going_in = generate("randn", value.shape, seed=9).cuda()
        gradients = [
            torch.autograd.grad(one, of, going_in) for one, of in ((value, ours), (exact, theirs))
        ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * other.abs().max().item())
