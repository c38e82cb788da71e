"""What no plan can mean is refused with an error, by every function that is asked about it."""

from typing import Any

import pytest

from .native import binding, host_module
from .test_conv_plan import BATCH_NORM, problem

_C = binding()
H200 = _C.DeviceProps()
NOTHING = _C.Program([], [])
TRAIN = _C.TAILS["batch_norm_train"]


def linear(m: int, n: int, k: int, dtype: int = 0, leading: int = 0) -> Any:
    return _C.FusedProblem(m, n, k, NOTHING, 0, NOTHING, 0, dtype, False, leading, leading)


@pytest.mark.parametrize(
    "invalid",
    [linear(64, 64, 64, dtype=7), linear(2**62, 2**62, 2**62), linear(-1, 64, 64)],
)
def test_nothing_is_slower_than_what_is_invalid(invalid: Any) -> None:
    assert _C.why_slower(invalid, H200) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": 7}, "unknown dtype 7"),
        ({"precision": 2}, "unknown precision 2"),
        ({"tail": TRAIN, "batch": 1, "out_h": 1, "out_w": 1}, "more than 1 value per channel"),
        ({"tail": TRAIN, "batch": 0}, "more than 1 value per channel"),
    ],
)
def test_invalid_convolutions(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _C.conv_why_not(problem(BATCH_NORM, **changes), H200)


@pytest.mark.parametrize("dtypes", [(7, 0), (0, -1)])
def test_logsumexp_of_an_unknown_dtype(dtypes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="unknown dtype"):
        _C.plan_logsumexp([4, 8], [8, 1], 2, *dtypes, H200)


def test_logsumexp_of_the_widest_stride_is_read_by_columns() -> None:
    """Its magnitude is no 64-bit integer with a sign."""
    plan = host_module().logsumexp_plan([1000, 1000], [4, -(2**63)], 2, 0, 132, False)
    assert plan["columns"]


def test_a_device_without_multiprocessors_is_refused_by_all() -> None:
    device = _C.DeviceProps(sm_count=0)
    with pytest.raises(ValueError, match="0 multiprocessors"):
        _C.check_device(device)
    for call in (
        lambda: _C.why_not(linear(64, 64, 64), device),
        lambda: _C.make_plan(linear(64, 64, 64), device),
        lambda: _C.select_policy(64, 64, 64, device),
        lambda: _C.conv_why_not(problem(BATCH_NORM), device),
        lambda: _C.make_conv_plan(problem(BATCH_NORM), device),
        lambda: _C.plan_logsumexp([4, 8], [8, 1], 2, 0, 0, device),
    ):
        with pytest.raises(ValueError, match="0 multiprocessors"):
            call()
    assert _C.why_slower(linear(64, 64, 64), device) is None
    assert _C.conv_why_slower(problem(BATCH_NORM), device) is None


@pytest.mark.parametrize("dtype", [1, 2])
@pytest.mark.parametrize("sizes", [(4, 256), (256, 256)])
def test_sums_of_no_products_are_handed_over(sizes: tuple[int, int], dtype: int) -> None:
    assert "K=0" in _C.why_not(linear(*sizes, 0, dtype), H200)
    assert _C.why_not(linear(0, sizes[1], 0, dtype), H200) is None
    before = linear(*sizes, 0, dtype), linear(sizes[0], 64, sizes[1], dtype)
    between = linear(sizes[0], 0, 64, dtype), linear(*sizes, 0, dtype)
    for chain in (before, between):
        assert "K=0" in _C.why_not_chain(*chain, H200)
