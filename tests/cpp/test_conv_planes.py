"""1x1 convolutions of NCHW images as they are: which are, where they are faster, what they say."""

from typing import Any

import pytest

from .native import binding
from .test_conv_plan import H200, NOTHING, TIERS, problem

_C = binding()

PLANES = _C.ConvPolicy(0, gemm=_C.GemmPolicy(0, 0, source=2))

# Of ResNet-50: sizes of x, out_channels, kernel, stride, padding, dilation, groups, transposed.
EXPAND = (64, 64, 56, 56, 256, 1, 1, 0, 1, 1, False)
REDUCE = (64, 1024, 14, 14, 256, 1, 1, 0, 1, 1, False)
NARROW = (64, 256, 56, 56, 64, 1, 1, 0, 1, 1, False)
ODD = (64, 2048, 7, 7, 512, 1, 1, 0, 1, 1, False)


def planes(shape: tuple[Any, ...], tier: str = "tf32", **changes: Any) -> Any:
    return problem(shape, tier, **{"pixel_stride": 1, **changes})


def is_in_planes(plan: Any) -> bool:
    return "a matrix product of planes as they are" in plan.describe()


@pytest.mark.parametrize("tail", [0, 2])
@pytest.mark.parametrize("shape", [EXPAND, REDUCE, NARROW, ODD], ids=str)
@pytest.mark.parametrize("tier", ["tf32", "ieee"])
def test_it_is_selected_and_x_is_not_converted(
    tier: str, shape: tuple[Any, ...], tail: int
) -> None:
    ieee = tier == "ieee"
    made = planes(shape, tier, tail=tail)
    assert tail == 0 or _C.conv_why_slower(made, H200) is None
    plan = _C.make_conv_plan(made, H200)
    assert is_in_planes(plan)
    assert plan.policy.gemm.source == 2
    assert plan.policy.gemm.tile_n == (64 if shape[4] == 64 else 128)
    assert plan.policy.gemm.promote_k == (0 if not ieee else 16 if shape[1] == 64 else 64)
    # The weight's planes and words, and the folded batch norm's factors and addends, are all.
    weight_bytes = (4 * shape[1] + 4) * shape[4] if ieee else 0
    assert plan.packed_bytes == weight_bytes
    assert plan.workspace_bytes == weight_bytes + (8 * shape[4] if tail else 0)
    words = plan.describe()
    assert ("split weight into two scaled fp16 planes\n" in words) == ieee
    assert "x into" not in words
    assert plan.describe() == _C.make_conv_plan(made, H200, PLANES).describe()
    assert plan.describe() == _C.make_conv_plan(made, H200, plan.policy).describe()
    element = "2, DType::kFloat16" if ieee else "1, DType::kFloat32"
    assert repr(plan.policy).startswith(f"ConvPolicy{{0, {element}, ")
    assert repr(plan.policy).endswith("Source::kNchw}}")
    assert plan.policy.element == (1 if ieee else 0)
    packed = _C.make_conv_plan(planes(shape, tier, tail=tail, packed_weight=True), H200)
    assert packed.policy == plan.policy
    assert packed.packed_bytes == weight_bytes
    assert packed.workspace_bytes == plan.workspace_bytes - weight_bytes
    assert ("the frozen weight has its planes" in packed.describe()) == ieee


@pytest.mark.parametrize(("channels", "side", "tiers"), [(333, 28, 1), (332, 27, 1), (336, 27, 2)])
def test_numbers_of_channels(channels: int, side: int, tiers: int) -> None:
    for tier, is_taken in (("ieee", tiers > 0), ("tf32", tiers > 1)):
        made = planes((64, channels, side, side, 77, *EXPAND[5:]), tier)
        assert is_in_planes(_C.make_conv_plan(made, H200)) == is_taken


def test_planes_and_channels_of_odd_sizes_are_packed() -> None:
    odd = planes((64, 333, 27, 27, 77, *EXPAND[5:]), "ieee")
    with pytest.raises(NotImplementedError, match="pixels or channels are a multiple of 4"):
        _C.make_conv_plan(odd, H200, PLANES)


def test_rows_are_whole_groups_of_pixels() -> None:
    plan = _C.make_conv_plan(planes((3, 72, 5, 4, 40, *EXPAND[5:])), H200, PLANES)
    assert f"{3 * 32}x40x72" in plan.describe()


@pytest.mark.parametrize(
    "changes",
    [
        {"pixel_stride": 0},
        {"channels_last": True, "pixel_stride": 64},
        {"dtype": 1},
        {"dtype": 2},
        {"groups": 2},
        {"pad_h": 1, "out_h": 58},
        {"stride_w": 2, "out_w": 28},
        {"kernel_w": 2, "out_w": 55},
        {"transposed": True},
        {"tail": 1},
        {"channels": 68},
        {"channels": 56},
        {"batch": 2**19},
    ],
    ids=str,
)
def test_what_is_not_read_in_planes(changes: dict[str, Any]) -> None:
    assert is_in_planes(_C.make_conv_plan(planes(EXPAND), H200, PLANES))
    changes = {name.replace("out_height", "out_h"): value for name, value in changes.items()}
    made = planes(EXPAND, **changes)
    words = r"contiguous fp32 planes|channels of 8|K=56|2\^30"
    with pytest.raises(NotImplementedError, match=words):
        _C.make_conv_plan(made, H200, PLANES)
    if _C.conv_why_not(made, H200) is None:
        assert not is_in_planes(_C.make_conv_plan(made, H200))


def test_other_architectures_have_no_kernel() -> None:
    for major in (8, 10, 12):
        device = _C.DeviceProps(major=major, minor=0)
        with pytest.raises(NotImplementedError, match=r"compute capability 9\.0 only"):
            _C.make_conv_plan(planes(EXPAND), device, PLANES)
        assert not is_in_planes(_C.make_conv_plan(planes(EXPAND), device))


def test_its_policies_are_of_nothing_else() -> None:
    listed = [policy for policy in _C.compiled_conv_policies() if not policy.patch_n]
    found = [policy for policy in listed if policy.gemm.source == 2]
    assert {(policy.gemm.tile_n, policy.gemm.promote_k) for policy in found} == {
        (tile_n, promote_k) for tile_n in (64, 128) for promote_k in (0, 16, 64)
    }
    for policy in found:
        tier, other = ("ieee", "tf32") if policy.gemm.promote_k else ("tf32", "ieee")
        assert is_in_planes(_C.make_conv_plan(planes(EXPAND, tier), H200, policy))
        with pytest.raises(NotImplementedError, match="does not multiply"):
            _C.make_conv_plan(planes(EXPAND, other), H200, policy)
        linear = _C.FusedProblem(256, 256, 256, NOTHING, 0, NOTHING, TIERS[tier], 0)
        with pytest.raises(NotImplementedError, match="Source::kNchw"):
            _C.make_plan(linear, H200, policy.gemm)
        if tier == "tf32":
            policy.gemm.source = 1
            with pytest.raises(NotImplementedError, match=r"not compiled|does not multiply"):
                _C.make_conv_plan(planes(EXPAND), H200, policy)
