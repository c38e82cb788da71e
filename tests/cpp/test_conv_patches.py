"""Convolutions of NCHW images by patches: which are, what they take of memory, what they say."""

from typing import Any

import pytest

from .native import binding
from .test_conv_plan import H200, problem

_C = binding()

# Sizes of x, out_channels, kernel, stride, padding, dilation, groups, transposed.
EMBED = (64, 3, 112, 112, 96, 7, 4, 3, 1, 1, False)
STRIDED = (32, 12, 96, 96, 96, 3, 2, 1, 1, 1, False)
WIDE = (16, 3, 300, 300, 72, 5, 2, 0, 1, 1, False)
SMALL = (2, 6, 20, 24, 12, 3, 1, 1, 1, 1, False)
TURNED = (2, 6, 20, 24, 12, 3, 1, 1, 1, 1, True)


TIERS = [("ieee", 2), ("tf32", 1)]
every_tier = pytest.mark.parametrize(("tier", "planes"), TIERS)


def policy(columns: int, planes: int = 2) -> Any:
    return _C.ConvPolicy(0, planes=planes, gemm=_C.GemmPolicy(0, 0, source=2), patch_n=columns)


def patches(shape: tuple[Any, ...], tier: str = "ieee", **changes: Any) -> Any:
    return problem(shape, tier, **{"pixel_stride": 1, **changes})


def is_by_patches(plan: Any) -> bool:
    return ": patches as they are, " in plan.describe()


@every_tier
@pytest.mark.parametrize("tail", [0, 2])
@pytest.mark.parametrize("shape", [EMBED, STRIDED, WIDE], ids=str)
def test_it_is_selected_and_says_so(
    shape: tuple[Any, ...], tail: int, tier: str, planes: int
) -> None:
    made = patches(shape, tier, tail=tail)
    assert _C.conv_why_slower(made, H200) is None
    plan = _C.make_conv_plan(made, H200)
    assert is_by_patches(plan)
    found = plan.policy
    assert (found.tile_n, found.planes, found.gemm.source) == (0, planes, 2)
    assert found.patch_n == 96
    assert found == policy(found.patch_n, planes)
    assert repr(found).endswith(f"Direct::kNone, {found.patch_n}}}")
    assert plan.describe() == _C.make_conv_plan(made, H200, found).describe()
    terms = shape[1] * shape[5] ** 2
    packed = -(-terms // 64) * 64 * 2 * planes * found.patch_n + 4 * found.patch_n
    assert plan.packed_bytes == -(-packed // 256) * 256
    assert plan.workspace_bytes == plan.packed_bytes
    frozen = _C.make_conv_plan(patches(shape, tier, tail=tail, packed_weight=True), H200, found)
    assert (frozen.workspace_bytes, frozen.packed_bytes) == (0, plan.packed_bytes)
    assert frozen.packed_key == plan.packed_key
    assert ("loses accuracy" in plan.describe()) == (planes == 2)
    assert "pack the weight\n" in plan.describe()
    assert "pack" not in frozen.describe()
    assert ("batch_norm with the running statistics" in plan.describe()) == (tail == 2)


@every_tier
@pytest.mark.parametrize("shape", [SMALL, TURNED], ids=str)
@pytest.mark.parametrize("columns", [64, 96])
def test_wider_kernels_take_fewer_channels(
    shape: tuple[Any, ...], columns: int, tier: str, planes: int
) -> None:
    forced = policy(columns, planes)
    plan = _C.make_conv_plan(patches(shape, tier), H200, forced)
    assert is_by_patches(plan)
    assert plan.policy.patch_n == columns
    more = (*shape[:4], columns + 1, *shape[5:])
    with pytest.raises(NotImplementedError, match="output channels"):
        _C.make_conv_plan(patches(more, tier), H200, forced)
    with pytest.raises(NotImplementedError, match="has not the planes of"):
        _C.make_conv_plan(patches(shape, tier), H200, policy(columns, 3 - planes))


def test_each_compiled_kernel_is_listed_and_makes_a_plan() -> None:
    listed = [one for one in _C.compiled_conv_policies() if one.patch_n]
    assert policy(96) in listed
    for one in listed:
        tier = dict(map(reversed, TIERS))[one.planes]
        assert _C.make_conv_plan(patches(SMALL, tier), H200, one).policy == one


@pytest.mark.parametrize(
    "changes",
    [
        {"pixel_stride": 0},
        {"channels_last": True, "pixel_stride": 6},
        {"dtype": 1},
        {"dtype": 2},
        {"tail": 1},
    ],
    ids=str,
)
def test_what_is_not_contiguous_fp32_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="patches are of contiguous fp32 NCHW"):
        _C.make_conv_plan(patches(SMALL, **changes), H200, policy(64))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 6, 20, 24, 12, 3, 1, 1, 1, 2, False), "in one group"),
        ((2, 64, 20, 24, 12, 3, 2, 1, 1, 1, True), "in one group"),
        ((2, 300, 20, 24, 12, 3, 1, 1, 1, 1, False), "do not fit"),  # of a box
        ((2, 128, 20, 24, 96, 3, 1, 1, 1, 1, False), "do not fit"),  # weights
        ((2, 64, 90, 96, 12, 3, 1, 1, 20, 1, False), "do not fit"),  # a patch
        ((2, 1, 20, 24, 12, 3, 1, 1, 1, 1, False), "sums of 9 terms"),
    ],
    ids=str,
)
def test_what_does_not_fit_says_why(shape: tuple[Any, ...], words: str) -> None:
    with pytest.raises(NotImplementedError, match=words):
        _C.make_conv_plan(patches(shape), H200, policy(96))


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (224, "2688 tiles of 4 x 16 and 448 tiles of 8 x 8 pixels"),  # 55 = 3 * 16 + 7
        (260, "3584 tiles of 2 x 32 pixels"),  # 64
        (72, "896 tiles of 4 x 16 and 448 tiles of 8 x 8 pixels"),  # 17 = 16 + 1
    ],
)
def test_columns_that_whole_blocks_leave_are_narrower_ones(width: int, words: str) -> None:
    made = patches((64, 3, 224, width, 96, 11, 4, 2, 1, 1, False))
    plan = _C.make_conv_plan(made, H200, policy(96))
    assert words in plan.describe()
