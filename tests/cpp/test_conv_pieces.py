"""How x comes to the kernels that read it as it lies, and in which order its lanes are."""

import re
from typing import Any

import pytest

from .native import binding
from .test_conv_plan import BATCH_NORM, CONV2D, H200, TIERS, TRANSPOSED, problem

_C = binding()


def resized(shape: tuple[Any, ...], width: int) -> tuple[Any, ...]:
    return (*shape[:3], width, *shape[4:])


@pytest.mark.parametrize(
    ("shape", "tier", "pieces"),
    [
        (BATCH_NORM, "tf32", "x in 3 pieces of 3 rows"),
        (BATCH_NORM, "ieee", "x in 5 pieces of 1 rows"),
        (CONV2D, "tf32", "x in 4 pieces of 1 rows"),
        (TRANSPOSED, "ieee", "x in 3 pieces of 1 rows"),
        (TRANSPOSED, "tf32", "x in 3 pieces of 4 rows"),
        (resized(BATCH_NORM, 127), "tf32", None),  # rows of no multiple of 16 bytes
        (resized(CONV2D, 1024), "tf32", None),  # wider than a box
        ((64, 32, 56, 56, 64, 3, 1, 1, 1, 1, False), "tf32", None),  # a tenth more pixels
    ],
)
def test_the_copy_engine_brings_x(shape: tuple[Any, ...], tier: str, pieces: str | None) -> None:
    plan = _C.make_conv_plan(problem(shape, tier), H200)
    assert "straight from the input" in plan.describe()
    found = re.search(r"x in \d+ pieces of \d+ rows", plan.describe())
    assert (found and found[0]) == pieces


@pytest.mark.parametrize("tier", TIERS)
def test_a_patch_of_a_strip_is_whole_rows(tier: str) -> None:
    """A few pixels more would bring another row of each piece of x."""
    plan = _C.make_conv_plan(problem(TRANSPOSED, tier), H200)
    assert plan.policy.strip > 0
    _, pitch, patch = (int(word) for word in plan.packed_key.split("} ")[1].split()[:3])
    assert patch % pitch == 0


FEW = (8, 64, 256, 256, 64, 3, 1, 1, 1, 1, False)  # 24 tiles one below the other


@pytest.mark.parametrize(
    ("shape", "sizes", "rows"),
    [
        (TRANSPOSED, (128, 1, 1, 1, 120, 0, 2), 10),  # 2 and twice 4, two rows of results at once
        (TRANSPOSED, (192, 1, 1, 1, 176, 0, 2), None),  # of more pixels
        (FEW, (128, 1, 1, 1, 88, 0, 2), 8),  # twice 4: blocks begin anew often
        (TRANSPOSED, (256, 1, 1, 1, 208, 0, 2), None),
        (FEW, (128, 1, 1, 2, 88, 0, 2), None),  # of two blocks of channels
        (BATCH_NORM, (128, 1, 1, 1, 0, 0, 2), None),  # no strips
        (FEW, (128, 1, 1, 1, 88, 16, 2), None),  # channels in chunks
        ((8, 64, 256, 256, 64, 1, 1, 0, 1, 1, False), (128, 1, 1, 1, 88, 0, 2), None),
        ((8, 8, 256, 256, 8, 3, 1, 1, 1, 1, False), (128, 1, 1, 1, 88, 0, 2), None),  # half steps
    ],
)
def test_patches_one_below_the_other_share_rows(
    shape: tuple[Any, ...], sizes: tuple[int, ...], rows: int | None
) -> None:
    text = _C.make_conv_plan(problem(shape), H200, _C.ConvPolicy(*sizes)).describe()
    found = re.search(r" one below the other in a ring of (\d+) rows", text)
    assert (found and int(found[1])) == rows, text


def test_rows_of_phases_lie_together_where_a_last_tap_has_no_weight_for_one() -> None:
    def rows_first(kernel: int, width: int = 224) -> int:
        shape = (64, 3, 224, width, 96, kernel, 4, 2, 1, 1, False)
        plan = _C.make_conv_plan(problem(shape, "tf32"), H200, _C.ConvPolicy(192, m_blocks=2))
        return int(plan.packed_key.split("} ")[1].split()[4])

    assert [rows_first(kernel) for kernel in (10, 11, 12)] == [0, 1, 0]
    assert rows_first(11, width=223) == 0  # read lane by lane
