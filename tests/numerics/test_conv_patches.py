"""Convolutions of NCHW images by patches: exact, accurate, within their memory."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse.testing import (
    exact_promotion,
    forced_conv_policy,
    generate,
    guarded,
    integers,
    kinds,
)

from ..cases.conv import PATCHES, ConvCase, laid_out
from .conv_common import bound_of, check, torch_conv, wide
from .test_conv_integers import policies

pytestmark = pytest.mark.cuda
compiled = [policy for policy in policies() if policy.patch_n > 0]
TIERS = {2: "ieee", 1: "tf32"}  # by planes
CLOSE = {2: 1e-6, 1: 1e-3}
every_case = pytest.mark.parametrize("case", PATCHES, ids=str)


@pytest.fixture(params=compiled or [None], ids=lambda one: one and f"{one.patch_n}-{one.planes}")
def policy(request: pytest.FixtureRequest) -> Iterator[object]:
    assert request.param is not None, "the native library has no patch kernel"
    with forced_conv_policy(request.param):
        yield request.param


def fits(policy, case: ConvCase) -> bool:
    """Whether it takes the case; what it does not it refuses."""
    if case.out_channels <= policy.patch_n:
        return True
    with pytest.raises(NotImplementedError, match="output channels"):
        case.ours(*drawn(case), precision=TIERS[policy.planes])
    return False


def kind_of(policy) -> tuple[torch.dtype, str]:
    return torch.float32, TIERS[policy.planes]


def drawn(case: ConvCase, kind: str = "randn") -> tuple[Tensor, Tensor, Tensor | None]:
    return case.draw(lambda shape, seed: generate(kind, shape, seed=seed), device="cuda")


def whole(shape: tuple[int, ...], seed: int) -> Tensor:
    return integers(shape, seed=seed)


@every_case
def test_whole_numbers_are_exact(case: ConvCase, policy, fused: None) -> None:
    if not fits(policy, case):
        return
    tensors = case.draw(whole, device="cuda")
    value = case.theirs(*wide(tensors))
    full = whole(value.shape, 4).cuda()
    vector = whole((case.out_channels, 1, 1), 5).cuda()
    with exact_promotion(), guarded():
        folded = case.ours(
            *tensors, epilogue=(pcf.mul(vector), pcf.relu()), precision=TIERS[policy.planes]
        )
        result = case.ours(
            *tensors, epilogue=(pcf.add(full), pcf.mul(vector)), precision=TIERS[policy.planes]
        )
    assert torch.equal(folded, (value * vector).relu().float())
    assert torch.equal(result, ((value + full) * vector).float())


@pytest.mark.parametrize("shift", [0, 1])
def test_weights_with_gaps(shift: int, policy, fused: None) -> None:
    x, weight, bias = drawn(PATCHES[2])
    moved = x.new_empty(x.numel() + shift)[shift:].view(x.shape).copy_(x)
    expected = PATCHES[2].ours(x, weight, bias, precision=TIERS[policy.planes])
    gapped = laid_out(weight, "gapped")
    result = PATCHES[2].ours(moved, gapped, bias, precision=TIERS[policy.planes])
    assert torch.equal(result, expected)


@pytest.mark.parametrize("draw", ["randn", "rand", "lognormal"])
@every_case
def test_accuracy(draw: str, case: ConvCase, policy, fused: None) -> None:
    if not fits(policy, case):
        return
    tensors = drawn(case, draw)
    exact, bound = case.theirs(*wide(tensors)), bound_of(case, *tensors)
    theirs = torch_conv(case, *tensors, tier=TIERS[policy.planes])
    check(
        case.ours(*tensors, precision=TIERS[policy.planes]), theirs, exact, kind_of(policy), bound
    )


# More than 16 tiles of each of an H200's 396 warpgroups: sums are promoted more seldom.
MANY = [
    ConvCase(3, 96, (11, 11), (224, 224), 120, stride=4, padding=2),
    ConvCase(32, 64, (3, 3), (128, 128), 28, transposed=True, bias=False),
]


@pytest.mark.parametrize("draw", ["rand", "randn", "lognormal"])
@pytest.mark.parametrize("case", MANY, ids=str)
def test_accuracy_of_many_tiles(draw: str, case: ConvCase, policy, fused: None) -> None:
    test_accuracy(draw, case, policy, fused)


@pytest.mark.parametrize("scale", [2.0**-118, 2.0**-60, 2.0**60, 2.0**118])
def test_any_range(scale: float, policy, fused: None) -> None:
    """Also of images that differ: each tile has a scale of its own."""
    case = PATCHES[2]
    x, weight, bias = drawn(case)
    x[0] *= scale
    tensors = x, weight, bias
    exact, theirs = (
        case.theirs(*wide(tensors)),
        torch_conv(case, *tensors, tier=TIERS[policy.planes]),
    )
    ours = case.ours(*tensors, precision=TIERS[policy.planes])
    for image in range(len(x)):
        check(ours[image], theirs[image], exact[image], kind_of(policy))


def test_tiles_that_differ(policy, fused: None) -> None:
    """A tile is scaled as the one before it, unless that does not suit its largest magnitude."""
    case = ConvCase(3, 64, (5, 5), (128, 96), 8)
    x, weight, bias = drawn(case)
    bands = torch.arange(case.size[0], device="cuda") // 16 % 3
    x *= torch.tensor([1.0, 64.0, 0.0], device="cuda")[bands][:, None]
    x[1::2] *= 2.0**-9
    tensors = x, weight, bias
    exact, bound = case.theirs(*wide(tensors)), bound_of(case, *tensors)
    theirs = torch_conv(case, *tensors, tier=TIERS[policy.planes])
    ours = case.ours(*tensors, precision=TIERS[policy.planes])
    check(ours, theirs, exact, kind_of(policy), bound)


@pytest.mark.parametrize("case", PATCHES[:5], ids=str)
def test_batch_norm_in_eval(case: ConvCase, policy, fused: None) -> None:
    if case.transposed or case.batch is None or not fits(policy, case):
        return
    tensors, features = drawn(case), case.out_channels
    running = generate("randn", (features,), seed=5), generate("rand", (features,), seed=6) + 0.5
    mean, var = (one.cuda() for one in running)
    with guarded():
        result = pcf.ops.conv2d_batch_norm(
            *tensors,
            **case.options,
            running_mean=mean,
            running_var=var,
            after=(pcf.gelu(), pcf.mul(0.5)),
            precision=TIERS[policy.planes],
        )
    exact = F.batch_norm(case.theirs(*wide(tensors)), mean.double(), var.double())
    theirs = F.batch_norm(torch_conv(case, *tensors, tier=TIERS[policy.planes]), mean, var)
    check(result, F.gelu(theirs) * 0.5, F.gelu(exact) * 0.5, kind_of(policy))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@every_case
def test_non_finite_values_stay_in_their_pixels(
    bad: float, case: ConvCase, policy, fused: None
) -> None:
    if not fits(policy, case):
        return
    x, weight, bias = drawn(case)
    for at in (0, -1):
        spoilt = x.clone()
        spoilt[(at,) * x.dim()] = bad
        ours = case.ours(spoilt, weight, bias, precision=TIERS[policy.planes])
        exact = case.theirs(*wide((spoilt, weight, bias)))
        assert torch.equal(kinds(ours), kinds(exact))
        # Of what is finite nothing is lost, in the same tile neither.
        finite = exact.isfinite()
        clean = case.theirs(*wide((x, weight, bias)))
        assert (ours.double() - clean)[finite].norm() <= CLOSE[policy.planes] * clean.norm()
        spoilt = weight.clone()
        spoilt[at, at] = bad
        ours = case.ours(x, spoilt, bias, precision=TIERS[policy.planes])
        # Padding is no factor of ours: of a weight that is not finite it may be one of theirs.
        exact = case.theirs(*wide((x, spoilt, bias)))
        assert torch.equal(ours.isfinite(), exact.isfinite())


def test_the_largest_values_stay_finite(policy, fused: None) -> None:
    x = torch.zeros(2, 12, 6, 8, device="cuda")
    weight = torch.zeros(8, 12, 2, 2, device="cuda")
    largest = torch.finfo(torch.float32).max
    for one, other in ((x, weight), (weight, x)):
        x.zero_(), weight.zero_()
        one[:, 3, 1, 1] = largest
        other[:, 3] = 0.5
        result = pcf.ops.conv2d(x, weight, precision=TIERS[policy.planes])
        exact = F.conv2d(x.double(), weight.double())
        torch.testing.assert_close(result.double(), exact, rtol=CLOSE[policy.planes], atol=0)
