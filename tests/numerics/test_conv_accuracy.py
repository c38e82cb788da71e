"""Convolutions are never less accurate than PyTorch's, measured against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pycutfuse as pcf
from pycutfuse.testing import DISTRIBUTIONS, exact_promotion, generate, integers, kinds
from pycutfuse.testing.forcing import Kind

from ..cases.conv import FEW, GRID, HANDED_OVER, KERNEL, KINDS, LAYOUTS, ConvCase, batches
from .conv_common import bound_of, check, conv_flag, torch_conv, wide

pytestmark = pytest.mark.cuda
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def drawing(distribution: str):
    """x from `distribution`, weight and bias from randn, as a network has them."""

    def draw(shape: tuple[int, ...], seed: int) -> Tensor:
        return generate(distribution if seed == 1 else "randn", shape, seed=seed)

    return draw


@every_kind
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("case", KERNEL, ids=str)
def test_shapes(kind: Kind, distribution: str, case: ConvCase, fused: None) -> None:
    dtype, tier = kind
    tensors = case.draw(drawing(distribution), device="cuda", dtype=dtype)
    result = case.ours(*tensors, precision=tier)
    exact, bound = case.theirs(*wide(tensors)), bound_of(case, *tensors)
    check(result, torch_conv(case, *tensors, tier=tier), exact, kind, bound)


@every_kind
@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("case", KERNEL, ids=str)
def test_positive_sums_do_not_drift(kind: Kind, positive: bool, case, fused: None) -> None:
    """Products of one sign show the truncation that randn hides."""

    def draw(shape: tuple[int, ...], seed: int) -> Tensor:
        value = generate("rand", shape, seed=seed)
        return value if positive or seed != 2 else -value

    dtype, tier = kind
    tensors = case.draw(draw, device="cuda", dtype=dtype)
    result = case.ours(*tensors, precision=tier)
    exact = case.theirs(*wide(tensors))
    check(result, torch_conv(case, *tensors, tier=tier), exact, kind, bound_of(case, *tensors))


@every_kind
@pytest.mark.parametrize("case", HANDED_OVER, ids=str)
def test_handed_over_shapes(kind: Kind, case: ConvCase, cuda: torch.device) -> None:
    dtype, tier = kind
    tensors = case.draw(drawing("randn"), device=cuda, dtype=dtype)
    result = case.ours(*tensors, precision=tier)
    found = pcf.counters()
    assert sum(found["handover"].values()) == 1, f"{case} has a kernel now: move it to KERNEL"
    assert not found["fallback"]
    exact, bound = case.theirs(*wide(tensors)), bound_of(case, *tensors)
    check(result, torch_conv(case, *tensors, tier=tier), exact, kind, bound)


SETTINGS = [(kind, case) for kind in KINDS for case in GRID]


@pytest.mark.parametrize(("kind", "case"), SETTINGS, ids=str)
def test_settings_and_layouts(kind: Kind, case: ConvCase, cuda: torch.device) -> None:
    """Fused or not: here the answer counts."""
    dtype, tier = kind
    for one in batches(case):
        for layout in LAYOUTS:
            tensors = one.draw(drawing("randn"), layout=layout, device=cuda, dtype=dtype)
            result = one.ours(*tensors, precision=tier)
            theirs = torch_conv(one, *tensors, tier=tier)
            assert result.dtype is dtype
            assert result.stride() == theirs.stride(), layout
            check(result, theirs, one.theirs(*wide(tensors)), kind, bound_of(one, *tensors))


@every_kind
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", [*FEW, KERNEL[0], KERNEL[2], KERNEL[12]], ids=str)
def test_programs(kind: Kind, layout: str, case: ConvCase, cuda: torch.device) -> None:
    dtype, tier = kind
    tensors = case.draw(drawing("randn"), layout=layout, device=cuda, dtype=dtype)
    theirs = torch_conv(case, *tensors, tier=tier)
    vector = generate("rand", (case.out_channels, 1, 1), seed=4, device=cuda).to(dtype)
    full = generate("randn", theirs.shape, seed=5, device=cuda).to(dtype)

    def chain(value: Tensor, vector: Tensor, full: Tensor) -> Tensor:
        return F.gelu(value * vector, approximate="tanh") + full

    steps = (pcf.mul(vector), pcf.gelu(approximate="tanh"), pcf.add(full))
    result = case.ours(*tensors, epilogue=steps, precision=tier)
    exact = chain(case.theirs(*wide(tensors)), vector.double(), full.double())
    check(result, chain(theirs, vector, full), exact, kind)


@every_kind
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", [(8, 64, 3, 66), (3, 96, 7, 41), (16, 24, 5, 29)], ids=str)
def test_batch_norm(kind: Kind, training: bool, distribution: str, shape, fused: None) -> None:
    channels, features, size, pixels = shape
    dtype, tier = kind
    options = {"device": "cuda", "dtype": dtype, "precision": tier}
    torch.manual_seed(3)
    layer = pcf.nn.Conv2dBatchNorm2dScale(channels, features, size, 2.0, **options).train(training)
    x = generate(distribution, (6, channels, pixels, 43), seed=1, device="cuda").to(dtype)
    with torch.no_grad():
        layer.bn.running_mean.copy_(generate("randn", (features,), seed=5))
        layer.bn.running_var.copy_(generate("rand", (features,), seed=6) + 0.5)
        theirs, exact = _copy(layer, dtype).train(training), _copy(layer, torch.float64)
        exact.train(training)
        with conv_flag(tier):
            expected = theirs(x)
        value = exact(x.double())
        check(layer(x), expected, value, kind)
    for name in ("running_mean", "running_var"):
        own, other = getattr(layer.bn, name), getattr(theirs.bn, name)
        check(own, other, getattr(exact.bn, name), kind)
    assert int(layer.bn.num_batches_tracked) == int(training)


def _copy(layer: pcf.nn.Conv2dBatchNorm2dScale, dtype: torch.dtype) -> nn.Module:
    made = pcf.nn.Conv2dBatchNorm2dScale(
        layer.conv.in_channels, layer.conv.out_channels, layer.conv.kernel_size, 2.0
    )
    made.load_state_dict(layer.state_dict())
    return made.to_torch().to("cuda", dtype)


@every_kind
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("case", KERNEL, ids=str)
def test_non_finite_values_stay_where_torch_keeps_them(kind: Kind, bad: float, case, fused) -> None:
    dtype, tier = kind
    x, weight, bias = case.draw(drawing("randn"), device="cuda", dtype=dtype)
    for place in ((0, 0, 0, 0), (-1, -1, -1, -1), (0, 0, 1, 2)):
        spoilt = x.clone()
        spoilt[place] = bad
        ours = case.ours(spoilt, weight, bias, precision=tier)
        assert torch.equal(kinds(ours), kinds(case.theirs(*wide((spoilt, weight, bias)))))
    if case.transposed or case.padding != 0:
        return  # whether padding times an infinite weight is NaN depends on torch's algorithm
    spoilt = weight.clone()
    spoilt[-1, 0, 0, 0] = bad
    ours = case.ours(x, spoilt, bias, precision=tier)
    assert torch.equal(kinds(ours), kinds(case.theirs(*wide((x, spoilt, bias)))))


@pytest.mark.parametrize("tier", ["ieee", "tf32"])
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-40, 2.0**40, 2.0**100])
def test_scaled_data(tier: str, scale: float, fused: None) -> None:
    kind = (torch.float32, tier)
    for case in (KERNEL[0], KERNEL[2], KERNEL[12]):
        x, weight, _ = case.draw(drawing("randn"), device="cuda")
        x = x * scale
        exact, bound = case.theirs(*wide((x, weight))), bound_of(case, x, weight)
        theirs = torch_conv(case, x, weight, tier=tier)
        check(case.ours(x, weight, precision=tier), theirs, exact, kind, bound)


@every_kind
def test_more_than_two_to_the_31_elements(kind: Kind, fused: None) -> None:
    """The first and the last image of a result of 2,148,532,224 elements are exact."""
    dtype, tier = kind
    weight = integers((64, 3, 3, 3), seed=2, device="cuda").to(dtype)
    last = integers((1, 3, 130, 130), seed=1, device="cuda").to(dtype)
    x = torch.cat((last, torch.zeros(2047, 3, 130, 130, device="cuda", dtype=dtype), last))
    with exact_promotion():
        result = pcf.ops.conv2d(x, weight, precision=tier)
    assert result.numel() > 2**31
    expected = F.conv2d(last.double(), weight.double()).to(dtype)
    assert torch.equal(result[:1], expected)
    assert torch.equal(result[-1:], expected)
    assert not bool(result[1000].any())
