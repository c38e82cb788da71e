"""1x1 convolutions as matrix products: which are, who is faster, and what a plan says."""

import re
from typing import Any

import pytest

from .native import binding
from .test_conv_plan import H200, NOTHING, SHIFTED, TIERS, problem

_C = binding()

PIXELS = _C.ConvPolicy(0)

# Of ResNet-50: sizes of x, out_channels, kernel, stride, padding, dilation, groups, transposed.
EXPAND = (64, 64, 56, 56, 256, 1, 1, 0, 1, 1, False)
REDUCE = (64, 1024, 14, 14, 256, 1, 1, 0, 1, 1, False)
# Sums that are shared out among multiprocessors, as there are few results.
DEEP = (1, 8192, 7, 7, 64, 1, 1, 0, 1, 1, False)


def pixels(shape: tuple[Any, ...], tier: str = "tf32", **changes: Any) -> Any:
    given = {"channels_last": True, "pixel_stride": shape[1]}
    return problem(shape, tier, **{**given, **changes})


def is_product(plan: Any) -> bool:
    return "a matrix product of its pixels" in plan.describe()


@pytest.mark.parametrize("dtype", [0, 1, 2])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("shape", [EXPAND, REDUCE], ids=str)
def test_the_plan_is_that_of_a_linear_layer(shape, tier: str, dtype: int) -> None:
    plan = _C.make_conv_plan(pixels(shape, tier, dtype=dtype), H200, PIXELS)
    rows = shape[0] * shape[2] * shape[3]
    leading = (0, 0) if dtype == 0 else (shape[1], shape[1])
    linear = _C.make_plan(
        _C.FusedProblem(
            rows, shape[4], shape[1], NOTHING, 0, NOTHING, TIERS[tier], dtype, False, *leading
        ),
        H200,
    )
    assert plan.policy.tile_n == 0
    assert plan.policy.gemm == linear.policy
    assert plan.workspace_bytes == linear.workspace_bytes
    assert plan.describe().endswith(linear.describe())
    assert is_product(plan)


@pytest.mark.parametrize("dtype", [0, 1, 2])
@pytest.mark.parametrize("tier", TIERS)
def test_it_is_selected_for_long_sums_of_few_pixels(tier: str, dtype: int) -> None:
    made = pixels(DEEP, tier, dtype=dtype)
    plan = _C.make_conv_plan(made, H200)
    assert is_product(plan)
    assert plan.policy.gemm.split_k > 1
    assert plan.describe() == _C.make_conv_plan(made, H200, PIXELS).describe()


def test_planes_of_the_weight_are_packed() -> None:
    sizes = {}
    for tier, count in (("ieee", 2), ("tf32", 1)):
        plan = _C.make_conv_plan(pixels(EXPAND, tier), H200, PIXELS)
        frozen = _C.make_conv_plan(pixels(EXPAND, tier, packed_weight=True), H200, PIXELS)
        layout = _C.planes_layout(256, 64, count)
        assert plan.packed_bytes == frozen.packed_bytes == layout[1] + layout[2]
        assert frozen.workspace_bytes < plan.workspace_bytes
        sizes[plan.packed_key] = plan.packed_bytes
        other = _C.make_conv_plan(pixels((7, *EXPAND[1:]), tier), H200, plan.policy)
        assert other.packed_key == plan.packed_key
    assert len(sizes) == 2
    assert _C.make_conv_plan(pixels(EXPAND, dtype=1), H200, PIXELS).packed_bytes == 0
    few = _C.make_conv_plan(pixels((1, 512, 3, 3, 200, *EXPAND[5:])), H200, PIXELS)
    assert few.policy.gemm.arch == 0  # read without planes
    assert few.packed_bytes == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"pixel_stride": 0},
        {"channels_last": False},
        {"groups": 2},
        {"pad_h": 1},
        {"stride_w": 2},
        {"kernel_w": 2},
        {"out_h": 57, "transposed": True, "dilation_h": 2},
        {"dtype": 1, "transposed": True},
        {"dtype": 2, "pixel_stride": 68},
        {"dtype": 1, "pixel_stride": 56},
    ],
    ids=str,
)
def test_what_is_no_matrix_product(changes: dict[str, Any]) -> None:
    assert is_product(_C.make_conv_plan(pixels(EXPAND), H200, PIXELS))
    made = pixels(EXPAND, **changes)
    assert not is_product(_C.make_conv_plan(made, H200))
    with pytest.raises((NotImplementedError, ValueError), match=r"pixels|multiple of 8"):
        _C.make_conv_plan(made, H200, PIXELS)


def test_short_sums_go_straight_from_the_input() -> None:
    """As linear layers of fewer than 64 features have no kernel at fp32."""
    short = pixels((64, 32, 56, 56, 256, *EXPAND[5:]), "ieee")
    assert not is_product(_C.make_conv_plan(short, H200))
    with pytest.raises(NotImplementedError, match="K=32"):
        _C.make_conv_plan(short, H200, PIXELS)


@pytest.mark.parametrize("tier", TIERS)
def test_long_sums_have_a_kernel_only_as_products(tier: str) -> None:
    """Of pixels as they lie or gathered."""
    long = (64, 5000, 28, 28, 512, *EXPAND[5:])
    assert is_product(_C.make_conv_plan(pixels(long, tier), H200, PIXELS))
    for made in (pixels(long, tier), problem(long, tier)):
        assert _C.make_conv_plan(made, H200).policy.tile_n == 0
    assert _C.make_conv_plan(problem(long, tier), H200).policy.gemm.source == 1
    planes, words = (2, "sums of 5000 terms") if tier == "ieee" else (1, "313 chunks|too few")
    for policy in SHIFTED:
        if policy.planes == planes:
            with pytest.raises(NotImplementedError, match=words):
                _C.make_conv_plan(problem(long, tier), H200, policy)


def test_one_pixel_has_either_layout() -> None:
    shape = (4096, 2048, 1, 1, 1024, *EXPAND[5:])
    made = [pixels(shape, channels_last=last) for last in (False, True)]
    plain, last = (_C.make_conv_plan(one, H200, PIXELS) for one in made)
    assert is_product(plain)
    assert plain.describe() == last.describe()


@pytest.mark.parametrize(("tier", "dtype"), [("ieee", 0), ("tf32", 0), ("tf32", 1), ("tf32", 2)])
def test_who_is_faster_is_not_asked_of_the_linear_layer(tier: str, dtype: int) -> None:
    """But against PyTorch's convolutions: few pixels are left to them, many are not."""
    few, many = ((n, 64, size, size, 512, *EXPAND[5:]) for n, size in ((1, 14), (256, 56)))
    reason = _C.conv_why_slower(pixels(few, tier, dtype=dtype), H200)
    found = re.fullmatch(
        r"convolution 1x64x14x14 -> 512x14x14, filter 1x1, .*: "
        r"PyTorch is expected to be faster, no fewer than (\d+) us against (\d+)",
        reason,
    )
    assert found is not None, reason
    assert int(found[1]) < int(found[2])
    assert _C.conv_why_slower(pixels(many, tier, dtype=dtype, tail=2), H200) is None


def test_a_convolution_that_is_faster_straight_from_the_input_is_taken() -> None:
    """Few results have x read once there; here it is split before."""
    few = (512, 64, 56, 56, 16, *EXPAND[5:])
    selected = _C.make_conv_plan(pixels(few, "ieee", tail=2), H200)
    assert "straight from the input" in selected.describe()
    assert is_product(_C.make_conv_plan(pixels(few, "ieee", tail=2), H200, PIXELS))
    more = pixels((512, 64, 56, 56, 64, *EXPAND[5:]), "ieee", tail=2)
    assert _C.conv_why_slower(more, H200) is None


def test_other_architectures_multiply_pixels_too() -> None:
    ampere = _C.DeviceProps(major=8, minor=0)
    assert _C.conv_why_not(pixels(EXPAND), ampere) is None
    forced = _C.make_conv_plan(pixels(EXPAND), ampere, PIXELS)
    assert (forced.policy.gemm.source, forced.policy.gemm.arch) == (0, 80)
    selected = _C.make_conv_plan(pixels(DEEP), ampere)
    assert is_product(selected)
    planes = _C.make_conv_plan(problem(EXPAND), ampere).policy.gemm
    assert (planes.source, planes.arch) == (1, 80)


def test_a_policy_is_forced_and_printed() -> None:
    for gemm in _C.compiled_policies():
        if gemm.promote_k:
            policy = _C.ConvPolicy(0, gemm=gemm)
            plan = _C.make_conv_plan(pixels(EXPAND, "ieee"), H200, policy)
            assert plan.policy.gemm == gemm
            assert repr(gemm) in repr(plan.policy)
    assert repr(_C.ConvPolicy(128)) == "ConvPolicy{128, 1, DType::kFloat16, 1, 0, 0, 2}"
    with pytest.raises(NotImplementedError, match="compiled"):
        _C.make_conv_plan(pixels(EXPAND), H200, _C.ConvPolicy(0, gemm=_C.GemmPolicy(96, 96)))
