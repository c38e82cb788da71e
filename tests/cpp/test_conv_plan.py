"""Which convolutions have a kernel, and how those that read x as it lies are laid out."""

import re
from typing import Any

import pytest

from .native import binding

_C = binding()
NOTHING = _C.Program([], [])
H200 = _C.DeviceProps()

# Sizes of x, out_channels, kernel, stride, padding, dilation, groups, transposed.
CONV2D = (256, 3, 224, 224, 96, 11, 4, 2, 1, 1, False)
TRANSPOSED = (8, 32, 512, 1024, 32, 3, 1, 0, 1, 1, True)
BATCH_NORM = (128, 8, 128, 128, 64, 3, 1, 0, 1, 1, False)
WIDER = (128, 16, 128, 128, 64, 3, 1, 0, 1, 1, False)
FOUNDING = (CONV2D, TRANSPOSED, BATCH_NORM)
TIERS = {"ieee": 0, "tf32": 1}


def out_size(size: int, kernel: int, stride: int, pad: int, dilation: int, transposed: bool) -> int:
    reach = dilation * (kernel - 1)
    if transposed:
        return (size - 1) * stride - 2 * pad + reach + 1
    return (size + 2 * pad - reach - 1) // stride + 1


def problem(shape: tuple[Any, ...], tier: str = "tf32", **changes: Any) -> Any:
    batch, channels, height, width, out, kernel, stride, pad, dilation, groups, transposed = shape
    sizes = [out_size(n, kernel, stride, pad, dilation, transposed) for n in (height, width)]
    given = {
        "batch": batch,
        "channels": channels,
        "height": height,
        "width": width,
        "out_channels": out,
        "kernel_h": kernel,
        "kernel_w": kernel,
        "stride_h": stride,
        "stride_w": stride,
        "pad_h": pad,
        "pad_w": pad,
        "dilation_h": dilation,
        "dilation_w": dilation,
        "groups": groups,
        "out_h": sizes[0],
        "out_w": sizes[1],
        "transposed": transposed,
        "program": NOTHING,
        "tail": 0,
        "after": NOTHING,
        "precision": TIERS[tier],
        "dtype": 0,
    }
    return _C.ConvProblem(**{**given, **changes})


# Straight from the input.
SHIFTED = [policy for policy in _C.compiled_conv_policies() if policy.tile_n > 0]
TAKEN = [(shape, tier) for shape in FOUNDING for tier in TIERS]


@pytest.mark.parametrize(("shape", "tier"), TAKEN)
def test_founding_problems_are_taken(shape: tuple[Any, ...], tier: str) -> None:
    assert _C.conv_why_not(problem(shape, tier), H200) is None
    assert _C.conv_why_slower(problem(shape, tier), H200) is None


def test_tiles_cover_every_result() -> None:
    text = _C.make_conv_plan(problem(BATCH_NORM), H200).describe()
    found = re.search(r"(\d+) tiles of (\d) x (\d+) results", text)
    assert found is not None
    tiles, blocks, results = map(int, found.groups())
    assert tiles * blocks * results >= 128 * 126 * 126


@pytest.mark.parametrize(("channels", "rows"), [(8, 4), (16, 4), (17, 2), (32, 2), (33, 0)])
def test_few_channels_make_several_rows_at_once(channels: int, rows: int) -> None:
    shape = (2, 8, 61, 150, channels, 3, 1, 1, 1, 1, False)
    policy = _C.ConvPolicy(128, 1, 1, 1, 104, 0, 2)
    text = _C.make_conv_plan(problem(shape), H200, policy).describe()
    found = re.search(r"(\d+) tiles of 2 x (?:(\d) rows of )?104 results", text)
    assert found is not None, text
    assert int(found[2] or 0) == rows
    blocks = -(-61 // max(rows, 1))
    assert int(found[1]) == 2 * 2 * -(-blocks // 2)  # images, strips, pairs of blocks


@pytest.mark.parametrize("strip", [176, 168, 104, 80])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_blocks_have_equal_shares_of_strips(batch: int, strip: int) -> None:
    shape = (batch, 32, 512, 1024, 32, 3, 1, 0, 1, 1, True)
    policy = _C.ConvPolicy(192, 1, 1, 1, strip, 0, 2)
    text = _C.make_conv_plan(problem(shape, "tf32"), H200, policy).describe()
    found = re.search(r"(\d+) tiles of .* channels, (\d+) one below the other", text)
    assert found is not None, text
    tiles, walk = map(int, found.groups())
    strips = -(-1026 // strip)
    walks = strips * -(-tiles // strips // walk)
    busiest = walk * -(-walks // H200.sm_count)
    assert tiles <= busiest * H200.sm_count <= 1.12 * tiles


@pytest.mark.parametrize("kernel", [1, 3, 8])
@pytest.mark.parametrize("tier", TIERS)
def test_blocks_of_even_rows_have_an_even_number_of_results(tier: str, kernel: int) -> None:
    """Statistics take pixels in pairs there."""
    checked = 0
    for policy in SHIFTED:
        if policy.planes != (2 if tier == "ieee" else 1):
            continue
        for out_width in range(6, 90, 2):
            shape = (3, 24, kernel + 30, out_width + kernel - 1, 24, kernel, 1, 0, 1, 1, False)
            try:
                text = _C.make_conv_plan(problem(shape, tier), H200, policy).describe()
            except NotImplementedError:
                continue
            found = re.search(r"tiles of \d x (\d+) results", text)
            assert found is not None
            assert int(found[1]) % 2 == 0, text
            checked += 1
    assert checked > 30


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"groups": 3}, RuntimeError, "groups is 3; it must divide"),
        ({"stride_h": 0}, ValueError, "stride_h is 0; it must be at least 1"),
        ({"batch": -1}, ValueError, "batch is -1; it must be at least 0"),
        ({"batch": 1 << 60}, RuntimeError, "too many elements"),
    ],
)
def test_invalid_problems(changes: dict[str, int], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        _C.make_conv_plan(problem(BATCH_NORM, **changes), H200)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 16, 32, 32, 16, 3, 2, 1, 2, 1, True), "transposed convolution of stride 2x2"),
        ((1, 8, 8192, 8192, 8, 4, 4, 0, 1, 1, True), "2^30 and more"),  # of the interleaved image
        ((2, 0, 32, 32, 16, 3, 1, 1, 1, 1, False), "no channels"),
    ],
)
def test_what_no_kernel_takes_is_said(shape: tuple[Any, ...], words: str) -> None:
    assert words in _C.conv_why_not(problem(shape), H200)


def test_other_architectures_have_no_kernel_that_reads_x_as_it_lies() -> None:
    ampere, reason = _C.DeviceProps(major=8, minor=0), "compute capability 9.0 only, not 8.0"
    for policy in SHIFTED:
        with pytest.raises(NotImplementedError, match=reason):
            _C.make_conv_plan(problem(BATCH_NORM), ampere, policy)
    gathered = _C.make_conv_plan(problem(BATCH_NORM), ampere)
    assert (gathered.policy.gemm.source, gathered.policy.gemm.arch) == (1, 80)
    groups = problem((8, 64, 56, 56, 64, 3, 1, 1, 1, 4, False))
    assert reason in _C.conv_why_not(groups, ampere)
    assert _C.conv_why_not(groups, H200) is None


# As they have no direct kernel either, and several groups no implicit GEMM.
@pytest.mark.parametrize(
    ("shape", "terms"),
    [
        ((1, 16, 40, 40, 64, 1, 1, 0, 1, 2, False), 8),
        ((1, 8, 40, 40, 64, 1, 1, 0, 1, 1, False), 8),
        ((1, 256, 40, 40, 64, 7, 1, 3, 1, 2, False), 6272),
    ],
)
def test_short_and_long_sums_at_ieee_are_left_to_pytorch(
    shape: tuple[Any, ...], terms: int
) -> None:
    assert f"sums of {terms} terms" in _C.conv_why_not(problem(shape, "ieee"), H200)
    assert _C.conv_why_not(problem(shape, "tf32"), H200) is None


@pytest.mark.parametrize(
    ("shape", "terms", "direct"),
    [
        ((1, 1, 40, 40, 64, 3, 1, 1, 1, 1, False), 9, 3),
        ((1, 14, 40, 40, 64, 1, 1, 0, 1, 2, False), 7, 2),
        ((1, 128, 40, 40, 64, 7, 1, 3, 1, 1, False), 6272, 0),
    ],
)
def test_short_and_long_sums_at_ieee_have_other_kernels(
    shape: tuple[Any, ...], terms: int, direct: int
) -> None:
    policy = _C.make_conv_plan(problem(shape, "ieee"), H200).policy
    assert (policy.tile_n, policy.direct, policy.gemm.source) == (0, direct, int(direct == 0))
    with pytest.raises(NotImplementedError, match=f"sums of {terms} terms"):
        _C.make_conv_plan(problem(shape, "ieee"), H200, _C.ConvPolicy(128, 2))


def test_every_compiled_policy_runs_a_founding_problem() -> None:
    for policy in SHIFTED:
        tier = "ieee" if policy.planes == 2 else "tf32"
        plan = _C.make_conv_plan(problem(WIDER, tier), H200, policy)
        assert plan.policy == policy
        assert plan.packed_bytes > 0
        assert repr(policy).removeprefix("Conv") in plan.describe().replace("ConvP", "P")


@pytest.mark.parametrize(
    ("tile", "channels", "words"),
    [
        (128, 7, "four products, promoted every 16 of K"),
        (128, 8, "four products, promoted every 32 of K"),
        (128, 15, "three products, promoted every 64 of K"),
        (256, 7, "four products, promoted every 16 of K"),
        (256, 8, "three products, promoted every 48 of K"),
        (256, 15, "three products, promoted every 64 of K"),
    ],
)
def test_short_sums_at_ieee_are_promoted_more_often(tile: int, channels: int, words: str) -> None:
    shape = (128, channels, *BATCH_NORM[2:])
    policy = _C.ConvPolicy(tile, 2, 1, 1, 0, 0, 2)
    assert words in _C.make_conv_plan(problem(shape, "ieee"), H200, policy).describe()


def test_long_tiles_at_ieee_need_all_weights_in_shared_memory() -> None:
    policy = _C.ConvPolicy(256, 2, 1, 1, 0, 0, 2)
    with pytest.raises(NotImplementedError, match=r"too few for 2 patches of .* and weights"):
        _C.make_conv_plan(problem((128, 32, *BATCH_NORM[2:]), "ieee"), H200, policy)


def test_a_policy_that_is_not_compiled() -> None:
    with pytest.raises(NotImplementedError, match="is not compiled"):
        _C.make_conv_plan(problem(BATCH_NORM), H200, _C.ConvPolicy(104))


def test_a_policy_of_the_other_tier_is_refused() -> None:
    """One plane would multiply at TF32's accuracy what asks for fp32's."""
    policy = _C.make_conv_plan(problem(WIDER, "tf32"), H200).policy
    with pytest.raises(NotImplementedError, match="has not the planes"):
        _C.make_conv_plan(problem(WIDER, "ieee"), H200, policy)


def test_packed_forms_of_equal_plans_are_equal() -> None:
    one, other = (_C.make_conv_plan(problem(WIDER), H200) for _ in range(2))
    assert one.packed_key == other.packed_key
    assert one.packed_key != _C.make_conv_plan(problem(WIDER, "ieee"), H200).packed_key


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (WIDER, {"stride_h": 2, "stride_w": 2, "out_h": 63, "out_w": 63}),
        (WIDER, {"kernel_h": 2, "dilation_h": 2}),
        (WIDER, {"groups": 2}),
        (WIDER, {"channels": 15}),
        (WIDER, {"out_channels": 63}),
        (WIDER, {"dtype": 1}),
        (WIDER, {"transposed": True, "pad_h": 2, "pad_w": 2}),
        ((1, 16, 8, 8, 64, 4, 1, 0, 1, 1, True), {"stride_h": 2, "out_channels": 32}),
    ],
)
def test_packed_forms_of_other_weights_differ(
    shape: tuple[Any, ...], changes: dict[str, int]
) -> None:
    policy = _C.ConvPolicy(128, 1, 1, 2, 0, 0, 2)
    one = _C.make_conv_plan(problem(shape), H200, policy)
    other = _C.make_conv_plan(problem(shape, **changes), H200, policy)
    assert one.packed_key != other.packed_key
