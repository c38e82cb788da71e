"""Direct kernels: which convolutions have one, how a policy names it, and their plans."""

import re
from typing import Any

import pytest

from .native import binding
from .test_conv_plan import H200, NOTHING, TIERS, out_size, problem

_C = binding()

SELECTED, ANY = 1, 2
DIRECT = _C.ConvPolicy(0, direct=SELECTED)

# Sizes of x, out_channels, kernel, stride, padding, dilation, groups, transposed.
DEPTHWISE = (64, 144, 56, 56, 144, 3, 1, 1, 1, 144, False)
STRIDED = (64, 96, 112, 112, 96, 3, 2, 1, 1, 96, False)
WIDE = (2, 32, 7, 700, 64, 7, 1, 3, 1, 32, False)
GROUPED = (8, 28, 20, 21, 12, 5, 2, 2, 1, 4, False)
TURNED = (8, 64, 20, 21, 64, 3, 1, 1, 1, 64, True)
WINDOWS = (DEPTHWISE, STRIDED, WIDE, GROUPED, TURNED)
SPREAD = (8, 64, 20, 21, 64, 4, 2, 1, 1, 64, True)
DILATED = (8, 64, 20, 21, 64, 3, 1, 2, 2, 64, False)
OTHERS = (SPREAD, DILATED, (1, 6, 9, 9, 6, 4, 1, 0, 1, 2, False))


def plan_of(
    shape: tuple[Any, ...], policy: Any = DIRECT, device: Any = H200, **changes: Any
) -> Any:
    return _C.make_conv_plan(problem(shape, **changes), device, policy)


@pytest.mark.parametrize("dtype", [0, 1, 2])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", WINDOWS + OTHERS, ids=str)
def test_a_plan_reads_and_writes_in_place(shape, channels_last, tier: str, dtype: int) -> None:
    given = {"channels_last": channels_last, "dtype": dtype, "tier": tier}
    plan = plan_of(shape, **given)
    assert plan.workspace_bytes == plan.packed_bytes == 0
    kernel = plan.policy.direct
    assert kernel == (shape[5] if shape in WINDOWS else ANY)
    text = plan.describe()
    assert "directly, sums of fp32" in text
    assert ("channels_last" in text) == channels_last
    assert ("pixels" in text) == (shape in WINDOWS)
    assert plan_of(shape, plan.policy, **given).describe() == text
    assert plan_of(shape, _C.ConvPolicy(0, direct=ANY), **given).policy.direct == ANY
    frozen = plan_of(shape, packed_weight=True, **given)
    assert (frozen.workspace_bytes, frozen.packed_bytes) == (0, 0)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", WINDOWS, ids=str)
@pytest.mark.parametrize("batch", [1, 64])
def test_blocks_cover_every_result(shape, channels_last: bool, batch: int) -> None:
    made = problem((batch, *shape[1:]), channels_last=channels_last)
    text = _C.make_conv_plan(made, H200, DIRECT).describe()
    pattern = r"(\d+) blocks of (\d+) groups of (\d+) results of (\d+) x (\d+) pixels"
    found = re.search(pattern, text)
    assert found is not None, text
    blocks, groups, features, rows, columns = map(int, found.groups())
    _, _, height, width, out, kernel, stride, pad, dilation, all_groups, transposed = shape
    setting = (kernel, stride, pad, dilation, transposed)
    size = [out_size(n, *setting) for n in (height, width)]
    pieces = [
        (all_groups, groups),
        (out // all_groups, features),
        *zip(size, (rows, columns), strict=True),
    ]
    expected = batch
    for whole, part in pieces:
        assert part <= whole + 3
        expected *= -(-whole // part)
    assert blocks == expected


def test_small_problems_are_cut_finer() -> None:
    """So that every multiprocessor has a block."""
    count = {}
    for batch in (1, 64):
        text = plan_of((batch, 512, 14, 14, 512, 3, 1, 1, 1, 512, False)).describe()
        count[batch] = int(re.search(r"(\d+) blocks of (\d+) groups", text)[2])
    assert count[1] < count[64]


def test_policies_are_printed_and_compared() -> None:
    found = [policy for policy in _C.compiled_conv_policies() if policy.direct]
    assert [policy.direct for policy in found] == [ANY, 3, 5, 7]
    assert {policy.tile_n for policy in found} == {0}
    names = [repr(policy).rsplit(", ", 1)[1] for policy in (DIRECT, *found)]
    kernels = ("kSelected", "kAny", "k3x3", "k5x5", "k7x7")
    assert names == [f"Direct::{name}}}" for name in kernels]
    assert repr(DIRECT) == "ConvPolicy{0, 1, DType::kFloat16, 1, 0, 0, 2, {}, Direct::kSelected}"
    assert _C.ConvPolicy(0) != DIRECT
    assert found[1] == plan_of(DEPTHWISE).policy
    other = _C.ConvPolicy(0)
    other.direct = 3
    assert other == found[1]


@pytest.mark.parametrize("direct", [5, 7, 9, -1])
def test_a_kernel_of_another_filter_is_refused(direct: int) -> None:
    words = f"not of the filter and strides of direct kernel {direct}"
    with pytest.raises(NotImplementedError, match=words):
        plan_of(DEPTHWISE, _C.ConvPolicy(0, direct=direct))
    with pytest.raises(NotImplementedError, match="direct kernel 3"):
        plan_of(DILATED, _C.ConvPolicy(0, direct=3))


@pytest.mark.parametrize("dtype", [0, 1, 2])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", WINDOWS, ids=str)
def test_its_windows_are_selected(shape, channels_last: bool, tier: str, dtype: int) -> None:
    given = {"channels_last": channels_last, "dtype": dtype, "tier": tier}
    selected = plan_of(shape, None, **given)
    assert selected.policy.direct == shape[5]
    assert selected.describe() == plan_of(shape, **given).describe()


def test_any_filter_is_selected_where_no_other_kernel_takes_it() -> None:
    """Of one channel a group, sums of fewer than 16 terms at ieee, and strides with dilation."""
    for shape, tier in (
        (DILATED, "ieee"),
        ((8, 64, 20, 21, 64, 2, 3, 0, 1, 64, False), "ieee"),
        ((8, 64, 20, 21, 64, 3, 2, 1, 2, 64, True), "tf32"),
    ):
        assert _C.conv_why_not(problem(shape, tier), H200) is None
        assert plan_of(shape, None, tier=tier).policy.direct == ANY


def test_batch_norm_in_training_is_left_to_other_kernels() -> None:
    assert plan_of(GROUPED, None).policy.direct == 5
    assert plan_of(GROUPED, None, tail=2).policy.direct == 5
    assert plan_of(GROUPED, None, tail=1).policy.tile_n > 0
    assert "sums of 9 terms" in _C.conv_why_not(problem(DEPTHWISE, "ieee", tail=1), H200)


@pytest.mark.parametrize(
    ("shape", "changes", "words"),
    [
        ((2, 64, 9, 9, 64, 3, 1, 1, 1, 8, False), {}, "8 channels of a group: a direct kernel"),
        ((2, 0, 9, 9, 64, 3, 1, 1, 1, 1, False), {}, "an image to read"),
        (DEPTHWISE, {"tail": 1}, "batch norm in eval only"),
        (
            (1, 1, 2**20, 1, 1, 2, 1, 2**19, 2**20, 1, False),
            {"kernel_h": 1025, "out_h": 1},
            "2^30 pixels in a row",
        ),
        ((1, 1, 1, 9, 1, 1, 2**29, 0, 1, 1, False), {}, "less than 2^30 pixels in a row"),
        ((2**29, 1, 1, 1, 8192, 2, 1, 1, 1, 1, False), {}, "fewer than 2^31 blocks"),
    ],
)
def test_what_it_does_not_take_is_said(shape: tuple[Any, ...], changes: Any, words: str) -> None:
    for direct in (SELECTED, ANY):
        with pytest.raises(NotImplementedError, match=re.escape(words)):
            plan_of(shape, _C.ConvPolicy(0, direct=direct), **changes)


def test_batch_norm_in_eval_and_its_program() -> None:
    relu = _C.Program([_C.OPS["relu"], -1], [0.0, 0.0])
    plan = plan_of(DEPTHWISE, tail=2, program=relu, after=relu)
    assert plan.workspace_bytes == 768  # a multiplier for each of 144 channels, in 256 bytes
    lines = plan.describe().splitlines()
    assert lines[0] == "fold the running statistics"
    assert lines[2:] == [
        "  epilogue: relu",
        "  epilogue: batch_norm with the running statistics",
        "  epilogue: relu",
    ]
    assert "epilogue" not in plan_of(DEPTHWISE, program=NOTHING).describe()


def test_no_images() -> None:
    assert "nothing to do" in plan_of((0, *DEPTHWISE[1:])).describe()


@pytest.mark.parametrize("major", [8, 9, 10, 12])
def test_every_architecture_has_direct_kernels(major: int) -> None:
    device = _C.DeviceProps(major=major, minor=0)
    assert plan_of(DEPTHWISE, device=device).policy.direct == 3
