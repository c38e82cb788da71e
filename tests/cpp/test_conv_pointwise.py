"""1x1 convolutions as matrix products: which are, who is faster, and what a plan says."""

from typing import Any

import pytest

from .native import binding
from .test_conv_plan import H200, NOTHING, TIERS, problem

_C = binding()

# Of ResNet-50: sizes of x, out_channels, kernel, stride, padding, dilation, groups, transposed.
EXPAND = (64, 64, 56, 56, 256, 1, 1, 0, 1, 1, False)
REDUCE = (64, 1024, 14, 14, 256, 1, 1, 0, 1, 1, False)


def pixels(shape: tuple[Any, ...], tier: str = "tf32", **changes: Any) -> Any:
    given = {"channels_last": True, "pixel_stride": shape[1]}
    return problem(shape, tier, **{**given, **changes})


def is_product(plan: Any) -> bool:
    return "a matrix product of its pixels" in plan.describe()


@pytest.mark.parametrize("dtype", [0, 1, 2])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("shape", [EXPAND, REDUCE], ids=str)
def test_the_plan_is_that_of_a_linear_layer(shape, tier: str, dtype: int) -> None:
    made = pixels(shape, tier, dtype=dtype)
    assert _C.conv_why_not(made, H200) is None
    plan = _C.make_conv_plan(made, H200)
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


def test_planes_of_the_weight_are_packed() -> None:
    sizes = {}
    for tier, count in (("ieee", 2), ("tf32", 1)):
        plan = _C.make_conv_plan(pixels(EXPAND, tier), H200)
        frozen = _C.make_conv_plan(pixels(EXPAND, tier, packed_weight=True), H200)
        layout = _C.planes_layout(256, 64, count)
        assert plan.packed_bytes == frozen.packed_bytes == layout[1] + layout[2]
        assert frozen.workspace_bytes < plan.workspace_bytes
        sizes[plan.packed_key] = plan.packed_bytes
        other = _C.make_conv_plan(pixels((7, *EXPAND[1:]), tier), H200, plan.policy)
        assert other.packed_key == plan.packed_key
    assert len(sizes) == 2
    assert _C.make_conv_plan(pixels(EXPAND, dtype=1), H200).packed_bytes == 0
    few = _C.make_conv_plan(pixels((1, 512, 3, 3, 200, *EXPAND[5:])), H200, _C.ConvPolicy(0))
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
    assert is_product(_C.make_conv_plan(pixels(EXPAND), H200))
    made = pixels(EXPAND, **changes)
    assert not is_product(_C.make_conv_plan(made, H200))
    with pytest.raises((NotImplementedError, ValueError), match=r"pixels|multiple of 8"):
        _C.make_conv_plan(made, H200, _C.ConvPolicy(0))


def test_short_sums_go_straight_from_the_input() -> None:
    """As linear layers of fewer than 64 features have no kernel at fp32."""
    short = pixels((64, 32, 56, 56, 256, *EXPAND[5:]), "ieee")
    assert not is_product(_C.make_conv_plan(short, H200))
    with pytest.raises(NotImplementedError, match="K=32"):
        _C.make_conv_plan(short, H200, _C.ConvPolicy(0))


@pytest.mark.parametrize("tier", TIERS)
def test_long_sums_have_a_kernel_only_as_products(tier: str) -> None:
    long = (64, 5000, 28, 28, 512, *EXPAND[5:])
    assert is_product(_C.make_conv_plan(pixels(long, tier), H200))
    reason = _C.conv_why_not(problem(long, tier), H200)
    assert ("sums of 5000 terms" if tier == "ieee" else "313 chunks") in reason


def test_one_pixel_has_either_layout() -> None:
    shape = (4096, 2048, 1, 1, 1024, *EXPAND[5:])
    assert is_product(_C.make_conv_plan(pixels(shape, channels_last=False), H200))


@pytest.mark.parametrize("dtype", [0, 1])
@pytest.mark.parametrize("shape", [EXPAND, REDUCE], ids=str)
def test_who_is_faster_is_asked_of_the_linear_layer(shape: tuple[Any, ...], dtype: int) -> None:
    relu, said = _C.Program([_C.OPS["relu"], -1], [0.0, 0.0]), set()
    channels, height, width, features = shape[1:5]
    for batch in (1, 2, 4, 8, 16, 64, 4096):
        made = pixels((batch, *shape[1:]), dtype=dtype, tail=2, after=relu)
        leading = (channels, channels) if dtype else (0, 0)
        sizes = (batch * height * width, features, channels)
        linear = _C.FusedProblem(*sizes, NOTHING, 2, relu, 1, dtype, False, *leading)
        slower = _C.why_slower(linear, H200)
        if slower is None:
            assert is_product(_C.make_conv_plan(made, H200))
        assert _C.conv_why_slower(made, H200) in (slower, None)
        said.add(slower is None)
    assert said == {True, False}


def test_a_convolution_that_is_faster_straight_from_the_input_is_taken() -> None:
    """Few channels are read once there; here they are split before."""
    few = pixels((64, 64, 56, 56, 64, *EXPAND[5:]), "ieee", tail=2)
    assert not is_product(_C.make_conv_plan(few, H200))
    assert _C.conv_why_slower(few, H200) is None


def test_other_architectures_multiply_pixels_too() -> None:
    ampere = _C.DeviceProps(major=8, minor=0)
    assert _C.conv_why_not(pixels(EXPAND), ampere) is None
    assert _C.make_conv_plan(pixels(EXPAND), ampere).policy.gemm.arch == 80
    assert "compute capability 9.0 only" in _C.conv_why_not(problem(EXPAND), ampere)


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
