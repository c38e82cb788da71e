"""Layers that are turned over: which, and what their plans say and need."""

from typing import Any

import pytest
import torch

import pycutfuse as pcf
from pycutfuse.program import EMPTY, encode
from pycutfuse.support import Problem, fused_problem
from pycutfuse.testing import turned_policy
from pycutfuse.testing.forcing import TURNED

from .native import binding

_C = binding()
FOUNDING = (1024, 8192, 8192)
BIASED = encode((pcf.add(torch.ones(1)), pcf.mul(2.0)))


def plan(
    size: tuple[int, int, int],
    tier: str = "tf32",
    tail: str = "none",
    program: Any = BIASED,
    after: Any = EMPTY,
    frozen: bool = False,
    policy: Any = None,
    device: Any = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    leading = 0 if dtype is torch.float32 else (size[2] + 7) // 8 * 8
    problem = Problem(*size, program, tail, after, tier, dtype, frozen, leading, leading, 0)
    return _C.make_plan(fused_problem(problem), device or _C.DeviceProps(), policy)


@pytest.mark.parametrize("tail", ["none", "batch_norm_train", "batch_norm_eval"])
def test_a_large_weight_and_few_rows(tail: str) -> None:
    found = plan(FOUNDING, tail=tail)
    assert found.policy.source == TURNED
    text = found.describe()
    assert text.startswith("split x into one scaled fp16 plane")
    assert "turned over" in text
    straight = plan(FOUNDING, tail=tail, frozen=True)
    assert straight.policy.source == 0
    assert "turned over" not in straight.describe()


def test_what_is_not_turned_over() -> None:
    assert plan(FOUNDING, "ieee").policy.source == 0
    assert plan(FOUNDING, tail="logsumexp").policy.source == 0
    assert plan(FOUNDING, program=encode((pcf.gelu(),))).policy.source == 0
    assert plan((16384, 4096, 4096)).policy.source == 0
    assert plan((8192, 1024, 1024)).policy.source == 0
    ampere = _C.DeviceProps(major=8, minor=0, sm_count=108)
    assert plan(FOUNDING, device=ampere).policy.source == 0


@pytest.mark.parametrize("last", [pcf.relu(), pcf.clamp(0.0, 6.0), pcf.maximum(0.5)])
def test_programs_may_end_in_bounds(last: Any) -> None:
    bounded = encode((pcf.mul(2.0), last))
    assert plan(FOUNDING, program=bounded).policy.source == TURNED
    assert plan(FOUNDING, tail="batch_norm_eval", after=bounded).policy.source == TURNED
    # Moments are of what is stored, and bounds come after batch norm.
    assert plan(FOUNDING, tail="batch_norm_train", program=bounded).policy.source == 0
    assert plan(FOUNDING, tail="batch_norm_eval", program=bounded).policy.source == 0
    assert plan(FOUNDING, program=encode((last, pcf.mul(2.0)))).policy.source == 0


def test_blocks_of_a_row_of_tiles_exchange_moments_in_one_wave() -> None:
    text = plan(FOUNDING, tail="batch_norm_train").describe()
    assert "wait for each other" in text
    assert "normalise in place" not in text
    # Of 17 tiles a row they would stream the weight from L2 too often.
    many = plan((4352, 8192, 8192), tail="batch_norm_train", policy=turned_policy())
    assert "normalise in place" in many.describe()


def test_the_workspace_is_enough_for_what_may_run_instead() -> None:
    """Where the weight's rows are not aligned: that has planes of both."""
    m, n, k = FOUNDING
    turned, straight = plan(FOUNDING), plan((m, n + 128, k), frozen=True)
    other = plan(FOUNDING, policy=_C.GemmPolicy(128, 256, 2, 0, 1))
    assert straight.workspace_bytes < 2 * m * k + 2**20
    assert turned.workspace_bytes >= other.workspace_bytes


def test_a_forced_policy_says_what_it_does_not_take() -> None:
    for options in ({"tier": "ieee"}, {"frozen": True}, {"tail": "logsumexp"}):
        with pytest.raises(NotImplementedError, match=r"turns over|does not multiply"):
            plan(FOUNDING, policy=turned_policy(), **options)
    split = turned_policy()
    split.split_k = 2
    with pytest.raises(NotImplementedError, match="not in parts of K"):
        plan(FOUNDING, policy=split)


def wide_policy(dtype: torch.dtype) -> Any:
    element = (torch.float32, torch.float16, torch.bfloat16).index(dtype)
    return _C.GemmPolicy(128, 256, 2, 0, 1, element=element)


NARROW = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def narrow(size: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    return plan(size, "ieee", dtype=dtype, **options)


@NARROW
@pytest.mark.parametrize("tail", ["none", "batch_norm_train", "batch_norm_eval"])
@pytest.mark.parametrize("size", [FOUNDING, (16384, 4096, 4096)], ids=str)
def test_large_layers_of_16_bits(size: tuple[int, int, int], tail: str, dtype: torch.dtype) -> None:
    found = narrow(size, dtype, tail=tail)
    expected = turned_policy(dtype=dtype)
    assert (found.policy.source, found.policy.element) == (TURNED, expected.element)
    text = found.describe()
    assert "turned over; where rows of the result are not aligned to 16 bytes" in text
    # Of few rows blocks exchange moments.
    exchanges = tail == "batch_norm_train" and size == FOUNDING
    assert ("wait for each other" in text) == exchanges
    assert ("normalise in place" in text) == (tail == "batch_norm_train" and not exchanges)


@NARROW
def test_16_bits_that_are_not_turned_over(dtype: torch.dtype) -> None:
    m, n, k = FOUNDING
    assert narrow((256, 256, 256), dtype).policy.source == 0
    assert narrow((m, n - 4, k), dtype).policy.source == 0
    assert narrow((m, n - 4, k), dtype, tail="batch_norm_train").policy.source == 0
    other = torch.bfloat16 if dtype is torch.float16 else torch.float16
    for wrong in (other, torch.float32):
        with pytest.raises(NotImplementedError, match="does not multiply"):
            narrow(FOUNDING, dtype, policy=turned_policy(dtype=wrong))


@NARROW
def test_programs_of_16_bits_may_end_in_a_sigmoid(dtype: torch.dtype) -> None:
    ended = encode((pcf.mul(2.0), pcf.sigmoid()))
    assert narrow(FOUNDING, dtype, program=ended).policy.source == TURNED
    assert narrow(FOUNDING, dtype, tail="batch_norm_eval", after=ended).policy.source == TURNED
    assert narrow(FOUNDING, dtype, tail="batch_norm_train", program=ended).policy.source == 0
    assert narrow(FOUNDING, dtype, program=encode((pcf.gelu(),))).policy.source == 0
    assert plan(FOUNDING, program=ended).policy.source == 0


@NARROW
def test_logsumexp_of_16_bits_has_a_partial_for_every_128_features(dtype: torch.dtype) -> None:
    """Whatever their number, as logits are not stored."""
    for n in (8192, 8188):
        found = narrow((1024, n, 8192), dtype, tail="logsumexp")
        assert found.policy.source == TURNED
        assert "logsumexp partials of every 128 columns" in found.describe()
        assert "turned over; beside operands that are not per channel: " in found.describe()
        straight = narrow((1024, n, 8192), dtype, tail="logsumexp", policy=wide_policy(dtype))
        assert "logsumexp partials of every 256 columns" in straight.describe()
        # 8 bytes each.
        assert found.workspace_bytes - straight.workspace_bytes >= 1024 * 32 * 8


@NARROW
def test_blocks_exchange_moments_where_rows_of_tiles_are_walked(dtype: torch.dtype) -> None:
    for raster, says in ((0, "normalise in place"), (1, "wait for each other")):
        policy = turned_policy(raster, dtype)
        found = narrow((1024, 256, 4096), dtype, tail="batch_norm_train", policy=policy)
        assert says in found.describe()


def test_columns_of_tiles_of_a_turned_layer_are_walked_together() -> None:
    """Beside a weight that L2 holds, or does not."""
    for k, swizzle in ((2048, 4), (4096, 8)):
        policy = narrow((16384, 4096, k)).policy
        assert (policy.source, policy.raster, policy.swizzle) == (TURNED, 0, swizzle)
