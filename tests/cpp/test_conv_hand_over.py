"""Random convolutions near the line: as they were timed, they are taken or handed over."""

from typing import Any

import pytest

from .native import binding
from .test_conv_plan import H200, problem

_C = binding()


# PyTorch was faster: 176 us instead of 278, 33 instead of 42, 69 instead of 72, 12 instead of 20.
@pytest.mark.parametrize(
    "shape",
    [
        (9, 78, 128, 134, 78, 10, 2, 3, 1, 78, False),
        (2, 32, 163, 186, 416, 3, 3, 0, 1, 32, False),
        (14, 32, 71, 75, 352, 3, 2, 0, 2, 32, False),
        (1, 2, 59, 27, 485, 9, 2, 7, 2, 1, False),
    ],
    ids=str,
)
def test_many_groups_and_ties_of_short_calls_are_pytorchs(shape: tuple[Any, ...]) -> None:
    assert _C.conv_why_slower(problem(shape, pixel_stride=1), H200) is not None


# 67 us instead of 215, 11 instead of 21, 15 instead of 53.
@pytest.mark.parametrize(
    "shape",
    [
        (28, 32, 17, 151, 384, 9, 2, 1, 1, 32, False),
        (8, 3, 112, 112, 96, 3, 2, 1, 1, 1, False),
        (14, 3, 53, 199, 77, 10, 3, 1, 1, 1, False),
    ],
    ids=str,
)
def test_where_ours_is_faster_it_is_taken(shape: tuple[Any, ...]) -> None:
    assert _C.conv_why_slower(problem(shape, pixel_stride=1), H200) is None
