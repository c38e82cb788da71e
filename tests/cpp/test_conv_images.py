"""Implicit GEMMs: what the copy engine gathers, which convolutions have one, and their plans."""

import math
import re
from typing import Any

import pytest

from .native import binding, host_module
from .test_conv_plan import H200, NOTHING, TIERS, out_size, problem

_C = binding()
_host = host_module()

GATHERED = _C.GemmPolicy(0, 0, source=1)
IMPLICIT = _C.ConvPolicy(0, gemm=GATHERED)

# Sizes of x, out_channels, kernel, stride, padding, dilation, groups, transposed.
DEEP = (64, 256, 14, 14, 256, 3, 1, 1, 1, 1, False)
STRIDED = (64, 512, 28, 28, 1024, 1, 2, 0, 1, 1, False)
WIDE = (8, 72, 31, 29, 100, 3, 1, 2, 2, 1, False)
TURNED = (8, 96, 20, 21, 64, 4, 1, 1, 1, 1, True)
TAKEN = (DEEP, STRIDED, WIDE, TURNED)

# count, height, width, kernel_h, kernel_w, strides, paddings, dilations (h before w).
GEOMETRIES = [
    (3, 14, 14, 3, 3, 1, 1, 1, 1, 1, 1),
    (2, 9, 7, 1, 1, 2, 2, 0, 0, 1, 1),
    (5, 7, 7, 5, 2, 1, 3, 2, 0, 1, 2),
    (2, 11, 13, 3, 4, 2, 1, 3, 5, 2, 1),
    (40, 3, 2, 2, 2, 1, 1, 0, 0, 1, 1),
    (2, 12, 13, 3, 3, 1, 1, -2, -1, 1, 1),  # of a transposed convolution
    (3, 10, 8, 4, 4, 8, 7, 2, 1, 1, 1),
]


def images(geometry: tuple[int, ...], channels: int = 64) -> tuple[int, ...]:
    count, height, width, r, s, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w = geometry
    out_h = out_size(height, r, stride_h, pad_h, dil_h, False)
    out_w = out_size(width, s, stride_w, pad_w, dil_w, False)
    sizes = (count, channels, height, width, out_h, out_w)
    return (*sizes, r, s, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w)


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_tile_is_of_the_pixels_that_the_filter_meets(geometry, planes: int) -> None:
    numbers = images(geometry)
    count, _, height, width, out_h, out_w, kernel_h, kernel_w = numbers[:8]
    stride_h, stride_w, pad_h, pad_w, dil_h, dil_w = numbers[8:]
    for plane in range(planes):
        for r in range(kernel_h):
            for s in range(kernel_w):
                read: list[Any] = []
                for first in range(0, count * out_h * out_w, 128):
                    read += _host.read_tile(numbers, planes, first, 128, plane, r, s)
                for row in range(count * out_h * out_w):
                    image, pixel = divmod(row, out_h * out_w)
                    h = pixel // out_w * stride_h - pad_h + r * dil_h
                    w = pixel % out_w * stride_w - pad_w + s * dil_w
                    inside = 0 <= h < height and 0 <= w < width
                    assert read[row] == ((plane * count + image, h, w) if inside else None)
                # What a tile reads past the last image is not stored; after the last plane: zeros.
                past = [one for one in read[count * out_h * out_w :] if one is not None]
                assert all(one[0] >= (plane + 1) * count for one in past)
                assert not past or plane + 1 < planes


@pytest.mark.parametrize("geometry", GEOMETRIES[:3], ids=str)
def test_results_lie_in_planes(geometry: tuple[int, ...]) -> None:
    numbers, columns = images(geometry), 5
    pixels = numbers[4] * numbers[5]
    for row in range(numbers[0] * pixels):
        for column in range(columns):
            expected = (row // pixels * columns + column) * pixels + row % pixels
            assert _host.place_in_planes(numbers, row, column, columns) == expected


@pytest.mark.parametrize("dtype", [0, 1, 2])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("shape", TAKEN, ids=str)
def test_a_plan_multiplies_what_it_gathers(shape: tuple[Any, ...], tier: str, dtype: int) -> None:
    plan = _C.make_conv_plan(problem(shape, tier, dtype=dtype), H200, IMPLICIT)
    batch, channels, height, width, features, kernel = shape[:6]
    padded = -(-channels // 64) * 64 * kernel**2
    sizes = [out_size(n, kernel, *shape[6:9], shape[10]) for n in (height, width)]
    rows = batch * sizes[0] * sizes[1]
    kind = ("bf16" if dtype == 2 else "fp16") if dtype else f"fp32 {tier}"
    planes = 1 if dtype or tier == "tf32" else 2
    packing, reading, convolution, gemm = plan.describe().splitlines()
    in_place = " unless it is channels_last with whole k-tiles"
    assert packing == "pack weight" + in_place * (dtype != 0)
    scaled = ("one scaled fp16 plane", "two scaled fp16 planes")[planes - 1]
    scaled += " of pixels, again where its sampled scale was too large"
    assert reading == "x into " + ("channels_last" if dtype else scaled)
    assert convolution.endswith(": an implicit gemm")
    assert gemm.startswith(f"gemm {rows}x{features}x{padded} {kind}")
    assert plan.policy.gemm.source == 1
    assert repr(plan.policy.gemm).endswith("Source::kImages}")
    assert plan.policy.planes == planes
    assert plan.packed_bytes >= planes * features * padded * 2
    # A filter of one tap skips pixels; they are not converted either.
    converted = sizes if kernel == 1 else (height, width)
    pixels = planes * batch * math.prod(converted) * -(-channels // 8) * 8 * 2
    assert plan.packed_bytes + pixels <= plan.workspace_bytes < plan.packed_bytes + 1.2 * pixels
    frozen = _C.make_conv_plan(
        problem(shape, tier, dtype=dtype, packed_weight=True), H200, plan.policy
    )
    assert frozen.describe().splitlines()[:2] == ["the frozen weight is packed", reading]
    assert frozen.packed_key == plan.packed_key
    assert frozen.workspace_bytes == plan.workspace_bytes - plan.packed_bytes


@pytest.mark.parametrize("dtype", [1, 2])
def test_pixels_whose_channels_lie_side_by_side_are_read_in_place(dtype: int) -> None:
    copied = problem(DEEP, dtype=dtype, channels_last=True)
    in_place = problem(DEEP, dtype=dtype, channels_last=True, pixel_stride=256)
    plans = [_C.make_conv_plan(made, H200, IMPLICIT) for made in (copied, in_place)]
    assert plans[0].workspace_bytes - plans[1].workspace_bytes >= 64 * 256 * 14 * 14 * 2
    assert ["x into channels_last" in plan.describe() for plan in plans] == [True, False]


@pytest.mark.parametrize("dtype", [0, 1, 2])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [DEEP, STRIDED], ids=str)
def test_many_channels_are_gathered(shape, channels_last: bool, tier: str, dtype: int) -> None:
    pixel_stride = shape[1] if channels_last else 0
    made = problem(shape, tier, dtype=dtype, channels_last=channels_last, pixel_stride=pixel_stride)
    selected = _C.make_conv_plan(made, H200)
    assert selected.policy.gemm.source == 1
    assert selected.describe() == _C.make_conv_plan(made, H200, IMPLICIT).describe()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("tail", [0, 1, 2])
def test_results_of_one_pixel_are_gathered(tail: int, tier: str) -> None:
    """No other kernel has them."""
    made = problem((128, 24, 3, 3, 40, 3, 1, 0, 1, 1, False), tier, tail=tail)
    assert _C.conv_why_not(made, H200) is None
    assert _C.make_conv_plan(made, H200).policy.gemm.source == 1


@pytest.mark.parametrize(
    ("shape", "changes", "words"),
    [
        ((2, 64, 9, 9, 64, 3, 1, 1, 1, 2, False), {}, "one group of channels"),
        ((2, 64, 9, 9, 64, 3, 2, 1, 1, 1, True), {}, "stride of 1"),
        ((2, 64, 29, 29, 64, 3, 9, 1, 1, 1, False), {}, "at most 8"),
        ((2, 64, 300, 9, 64, 3, 1, 129, 1, 1, False), {}, "padding of at most 128"),
        ((2, 64, 300, 300, 64, 2, 1, 0, 256, 1, False), {}, "filters over at most 256"),
        ((2, 7, 9, 9, 64, 3, 1, 1, 1, 1, False), {}, "sums of 63 terms"),
        ((1, 8, 2**15, 2**15, 8, 3, 8, 1, 1, 1, False), {}, "less than 2^30 pixels"),
    ],
)
def test_what_it_does_not_take_is_said(shape: tuple[Any, ...], changes: Any, words: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(words)):
        _C.make_conv_plan(problem(shape, "ieee", **changes), H200, IMPLICIT)


@pytest.mark.parametrize("forced", [IMPLICIT, None], ids=["forced", "selected"])
@pytest.mark.parametrize("tier", TIERS)
def test_other_architectures_have_implicit_gemms(tier: str, forced: Any) -> None:
    plan = _C.make_conv_plan(problem(DEEP, tier), _C.DeviceProps(major=8, minor=0), forced)
    assert (plan.policy.gemm.arch, plan.policy.gemm.source) == (80, 1)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", [0, 1, 2])
@pytest.mark.parametrize("channels_last", [True, False])
def test_batch_norm_in_training(channels_last: bool, dtype: int, tier: str) -> None:
    """A pass over what is stored normalises it, whichever its layout."""
    made = problem(DEEP, tier, tail=1, dtype=dtype, channels_last=channels_last)
    plan = _C.make_conv_plan(made, H200, IMPLICIT)
    assert plan.describe().splitlines()[-3:] == [
        "  epilogue: batch-norm partials of every 64 rows",
        "merge partials, update running statistics",
        "normalise in place",
    ]
    alone = _C.make_conv_plan(problem(DEEP, tier, dtype=dtype), H200, plan.policy)
    assert plan.workspace_bytes > alone.workspace_bytes
    assert _C.make_conv_plan(made, H200).policy == plan.policy


def test_policies_are_of_images_or_of_matrices() -> None:
    gathers = [p for p in _C.compiled_conv_policies() if p.gemm.source == 1]
    assert {(p.planes, p.element) for p in gathers} >= {(2, 1), (1, 1)}
    for policy in gathers:
        tier, dtype = ("ieee", 0) if policy.planes == 2 else ("tf32", 2 * (policy.element == 2))
        plan = _C.make_conv_plan(problem(DEEP, tier, dtype=dtype), H200, policy)
        assert plan.policy == policy
        linear = _C.FusedProblem(256, 256, 256, NOTHING, 0, NOTHING, TIERS[tier], dtype)
        with pytest.raises(NotImplementedError, match="Source::kImages"):
            _C.make_plan(linear, H200, policy.gemm)
    for gemm in _C.compiled_policies():
        assert gemm.source == 0
        gemm.source = 1
        if gemm not in [policy.gemm for policy in gathers]:
            with pytest.raises(NotImplementedError, match=r"not compiled|does not multiply"):
                _C.make_conv_plan(problem(DEEP, "ieee"), H200, _C.ConvPolicy(0, gemm=gemm))
