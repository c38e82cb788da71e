"""By which mechanism a convolution runs, and where PyTorch's is expected to be faster."""

import re
from typing import Any

import pytest

from .native import binding
from .test_conv_plan import BATCH_NORM, CONV2D, H200, NOTHING, TIERS, problem

_C = binding()

# Sizes of x, out_channels, kernel, stride, padding, dilation, groups, transposed.
RICH = (64, 512, 14, 14, 512, 3, 1, 1, 1, 1, False)
STRIDED = (64, 512, 28, 28, 1024, 1, 2, 0, 1, 1, False)
TURNED = (64, 256, 28, 28, 128, 3, 1, 1, 1, 1, True)
DEPTHWISE = (64, 144, 56, 56, 144, 3, 1, 1, 1, 144, False)
WINDOW = (32, 256, 56, 56, 256, 7, 1, 3, 1, 256, False)
GROUPS = (8, 64, 56, 56, 64, 3, 1, 1, 1, 4, False)
SPREAD = (64, 64, 28, 28, 32, 4, 2, 1, 1, 1, True)
PIXELS = (1, 8192, 7, 7, 64, 1, 1, 0, 1, 1, False)
COLUMNS = (64, 4096, 28, 28, 16, 1, 1, 0, 1, 1, False)  # few of a matrix product
STEM = (64, 3, 224, 224, 64, 7, 2, 3, 1, 1, False)
TINY = (1, 16, 16, 16, 8, 3, 1, 1, 1, 1, False)

# Each by a factor of 1.5 and more, or as no other has a kernel for it. Of NCHW and channels_last.
SELECTED = {
    BATCH_NORM: ("shift", "shift"),
    CONV2D: ("shift", "shift"),
    STEM: ("shift", "shift"),
    GROUPS: ("shift", "shift"),
    SPREAD: ("shift", "shift"),
    RICH: ("implicit", "implicit"),
    STRIDED: ("implicit", "implicit"),
    TURNED: ("implicit", "implicit"),
    DEPTHWISE: ("direct", "direct"),
    WINDOW: ("direct", "direct"),
    PIXELS: ("implicit", "pixels"),
}
KINDS = [("ieee", 0), ("tf32", 0), ("tf32", 1), ("tf32", 2)]  # tier, dtype
every_kind = pytest.mark.parametrize(("tier", "dtype"), KINDS)


def mechanism(policy: Any) -> str:
    if policy.tile_n:
        return "shift"
    if policy.direct:
        return "direct"
    return "implicit" if policy.gemm.source == 1 else "pixels"


def laid_out(
    shape: tuple[Any, ...], last: bool, tier: str = "tf32", dtype: int = 0, **changes: Any
) -> Any:
    """As calls have it, with pixels equally far apart if they are channels_last."""
    readable = last and (dtype == 0 or shape[1] % 8 == 0)
    given = {"dtype": dtype, "channels_last": last, "pixel_stride": shape[1] * readable}
    return problem(shape, tier, **given, **changes)


def times(made: Any) -> tuple[int, int]:
    """Expected microseconds of PyTorch and of ours, where PyTorch is faster."""
    reason = _C.conv_why_slower(made, H200)
    assert reason is not None
    words = r".*: PyTorch is expected to be faster, no fewer than (\d+) us against (\d+)"
    found = re.fullmatch(words, reason)
    assert found is not None, reason
    return int(found[1]), int(found[2])


def is_taken(made: Any) -> bool:
    return _C.conv_why_slower(made, H200) is None


@every_kind
@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("shape", SELECTED, ids=str)
def test_the_fastest_mechanism_is_selected(shape, last: bool, tier: str, dtype: int) -> None:
    made = laid_out(shape, last, tier, dtype)
    assert _C.conv_why_not(made, H200) is None
    plan = _C.make_conv_plan(made, H200)
    assert mechanism(plan.policy) == SELECTED[shape][last]
    forced = _C.make_conv_plan(made, H200, plan.policy)
    assert forced.policy == plan.policy
    assert forced.describe() == plan.describe()


@every_kind
def test_every_mechanism_is_selected_for_some_shape(tier: str, dtype: int) -> None:
    found = [
        {
            mechanism(_C.make_conv_plan(laid_out(shape, last, tier, dtype), H200).policy)
            for shape in SELECTED
        }
        for last in (False, True)
    ]
    assert found == [{"shift", "implicit", "direct"}, {"shift", "implicit", "direct", "pixels"}]


@every_kind
@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "channels_last"])
def test_batch_norm_in_training_has_no_direct_kernel(last: bool, tier: str, dtype: int) -> None:
    seven = (32, 28, 56, 56, 256, 7, 1, 3, 1, 4, False)  # channels a group
    for shape, tail, wanted in (
        (BATCH_NORM, 1, "shift"),
        (RICH, 1, "implicit"),
        (WINDOW, 2, "direct"),
        (seven, 1, "shift"),
    ):
        plan = _C.make_conv_plan(laid_out(shape, last, tier, dtype, tail=tail), H200)
        assert mechanism(plan.policy) == wanted


def test_what_no_mechanism_takes_is_said_in_words_of_the_first() -> None:
    shape, shift = (128, 32, 3, 3, 16, 3, 1, 0, 1, 2, False), _C.ConvPolicy(128)
    reason = _C.conv_why_not(problem(shape), H200)
    assert reason == "rows of 1 pixels do not suit blocks of 128"
    for policy in (None, shift):
        with pytest.raises(NotImplementedError, match=reason):
            _C.make_conv_plan(problem(shape), H200, policy)
    others = {
        "one group of channels": _C.ConvPolicy(0, gemm=_C.GemmPolicy(0, 0, source=1)),
        "no matrix product of pixels": _C.ConvPolicy(0),
        "16 channels of a group": _C.ConvPolicy(0, direct=1),
    }
    for words, policy in others.items():
        with pytest.raises(NotImplementedError, match=words):
            _C.make_conv_plan(problem(shape), H200, policy)
    # Who is faster is not asked then, nor where there is nothing to do.
    assert is_taken(problem(shape))
    empty = problem((0, *TINY[1:]))
    assert _C.conv_why_not(empty, H200) is None
    assert is_taken(empty)
    assert "nothing to do" in _C.make_conv_plan(empty, H200).describe()


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("shape", [RICH, TURNED, DEPTHWISE, WINDOW, BATCH_NORM], ids=str)
def test_other_architectures_select_among_the_others(shape: tuple[Any, ...], last: bool) -> None:
    wanted = {"shift": "implicit"}.get(SELECTED[shape][last], SELECTED[shape][last])
    for major in (8, 10, 12):
        device = _C.DeviceProps(major=major, minor=0)
        policy = _C.make_conv_plan(laid_out(shape, last), device).policy
        assert mechanism(policy) == wanted
        assert wanted == "direct" or policy.gemm.arch == 80


@every_kind
@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "channels_last"])
def test_a_tiny_problem_is_slower(last: bool, tier: str, dtype: int) -> None:
    torchs, ours = times(laid_out(TINY, last, tier, dtype))
    assert 1.5 * torchs < ours


TAKEN = [
    *((shape, last, kind) for shape in (BATCH_NORM, CONV2D) for last in (0, 1) for kind in KINDS),
    *((WINDOW, 0, kind) for kind in KINDS),
    *((shape, 0, kind) for shape in (STEM, RICH, TURNED, DEPTHWISE) for kind in KINDS[:2]),
    *((shape, 1, KINDS[0]) for shape in (STEM, RICH, TURNED, WINDOW, COLUMNS)),
]


@pytest.mark.parametrize(("shape", "last", "kind"), TAKEN)
def test_large_problems_are_taken(shape: tuple[Any, ...], last: int, kind: tuple[Any, ...]) -> None:
    assert is_taken(laid_out(shape, bool(last), *kind))


def test_they_are_of_every_mechanism() -> None:
    made = [laid_out(shape, bool(last), *kind) for shape, last, kind in TAKEN]
    found = {mechanism(_C.make_conv_plan(one, H200).policy) for one in made}
    assert found == {"shift", "implicit", "direct", "pixels"}


def test_channels_last_is_left_to_pytorch_where_that_is_faster() -> None:
    assert is_taken(laid_out(SPREAD, False))
    torchs, ours = times(laid_out(SPREAD, True))
    assert 1.3 * torchs < ours
    torchs, ours = times(laid_out(DEPTHWISE, True, dtype=1))
    assert 1.3 * torchs < ours
    assert is_taken(laid_out(CONV2D, True))


# On an H100 eager PyTorch took 3 to 20 times as long as ours.
@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize(
    "shape",
    [
        (16, 96, 41, 43, 192, 5, 1, 2, 1, 2, False),
        (16, 64, 56, 56, 64, 3, 1, 1, 1, 4, False),
        (60, 128, 108, 26, 64, 5, 1, 1, 1, 2, False),
        (41, 96, 119, 46, 16, 7, 1, 3, 1, 2, True),
        (3, 128, 82, 40, 128, 3, 1, 1, 1, 1, False),
    ],
    ids=str,
)
def test_what_is_slow_in_fp32_is_taken(shape: tuple[Any, ...], last: bool) -> None:
    assert is_taken(laid_out(shape, last, "ieee"))


# There it transforms filters: 404 us of ours' 1,767 and 38 of 125.
@pytest.mark.parametrize(
    "shape",
    [
        (48, 84, 56, 56, 51, 9, 1, 0, 1, 1, False),
        (42, 47, 7, 7, 22, 11, 1, 5, 1, 1, False),
    ],
    ids=str,
)
def test_large_filters_of_many_images_are_not(shape: tuple[Any, ...]) -> None:
    torchs, ours = times(problem(shape, "ieee"))
    assert 1.3 * torchs < ours


# PyTorch took 54 us for the first, one filter tap after the other: ours 20.
@pytest.mark.parametrize(
    "shape",
    [
        (14, 3, 53, 199, 77, 10, 3, 1, 1, 1, False),
        (2, 7, 28, 28, 96, 13, 1, 6, 1, 1, False),
        (2, 3, 32, 32, 96, 13, 1, 6, 1, 1, False),
    ],
    ids=str,
)
def test_many_taps_of_few_results_are_taken(shape: tuple[Any, ...]) -> None:
    assert is_taken(problem(shape))


@pytest.mark.parametrize("shape", [(2, 7, 28, 28, 96), (2, 3, 32, 32, 96)], ids=str)
def test_one_tap_of_them_is_not(shape: tuple[int, ...]) -> None:
    torchs, ours = times(problem((*shape, 1, 1, 0, 1, 1, False)))
    assert 1.3 * torchs < ours


def test_more_work_takes_pytorch_longer() -> None:
    """Of channels, filters and taps."""

    def torchs(channels: int = 16, filters: int = 8, kernel: int = 3) -> int:
        shape = (1, channels, 16, 16, filters, kernel, 1, kernel // 2, 1, 1, False)
        return times(problem(shape))[0]

    for more in (
        [torchs(channels=count) for count in (16, 64, 256)],
        [torchs(filters=count) for count in (8, 64, 512)],
        [torchs(kernel=size) for size in (1, 3, 5, 7)],
    ):
        assert more == sorted(more)
        assert more[0] < more[-1]


@every_kind
@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "channels_last"])
def test_dilation_is_no_work(last: bool, tier: str, dtype: int) -> None:
    def spread(shape: tuple[Any, ...], dilation: int) -> Any:
        return laid_out((*shape[:7], dilation, dilation, *shape[9:]), last, tier, dtype)

    torchs = {times(spread(TINY, dilation))[0] for dilation in (1, 2, 3)}
    assert len(torchs) == 1
    assert all(is_taken(spread(BATCH_NORM, dilation)) for dilation in (1, 2, 3))


@every_kind
def test_what_follows_takes_pytorch_further_passes(tier: str, dtype: int) -> None:
    """But for a bias, which its convolutions add."""
    bias = _C.Program([_C.OPS["add"], 0], [0.0, 0.0])
    relu = _C.Program([_C.OPS["relu"], -1], [0.0, 0.0])
    both = _C.Program([_C.OPS["add"], 0, _C.OPS["relu"], -1], [0.0] * 4)

    def torchs(**changes: Any) -> int:
        return times(laid_out(TINY, False, tier, dtype, **changes))[0]

    alone, normalised, trained = torchs(), torchs(tail=2), torchs(tail=1)
    assert alone < normalised
    assert alone < trained
    assert torchs(program=bias) == torchs(program=NOTHING) == alone
    assert alone < torchs(program=both)
    for tail in (1, 2):
        assert torchs(tail=tail) < torchs(tail=tail, after=relu)
        assert torchs(tail=tail, after=relu) == torchs(program=both, tail=tail)
        assert torchs(tail=tail, after=relu) < torchs(program=both, tail=tail, after=relu)


@pytest.mark.parametrize("tier", TIERS)
def test_larger_batches_are_taken(tier: str) -> None:
    few = (1, 8, 32, 32, 64, 3, 1, 0, 1, 1, False)
    torchs, ours = times(problem(few, tier))
    assert 1.3 * torchs < ours
    assert is_taken(problem((2048, *few[1:]), tier))
