"""Rows that are split while the first tiles are multiplied: which, and by how many blocks."""

import math
from typing import Any

import pytest
import torch

import pycutfuse as pcf
from pycutfuse.program import EMPTY, encode
from pycutfuse.support import Problem, fused_problem

from .native import binding

_C = binding()

SIZES = (
    *((1024, 8192, 8192), (16384, 4096, 4096), (16384, 4096, 2048), (1000, 11008, 4096)),
    *((8192, 8192, 1024), (333, 50000, 2048), (50000, 333, 2048), (4096, 4096, 4096)),
)
TIERS = ("ieee", "tf32")
DEVICES = (_C.DeviceProps(), _C.DeviceProps(sm_count=114), _C.DeviceProps(sm_count=3))


def plan(
    size: tuple[int, int, int],
    tier: str = "ieee",
    tail: str = "none",
    frozen: bool = False,
    policy: Any = None,
    device: Any = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    problem = Problem(*size, EMPTY, tail, EMPTY, tier, dtype, frozen, 0, 0, 0)
    return _C.make_plan(fused_problem(problem), device or _C.DeviceProps(), policy)


def first_row(found: Any) -> int:
    """The first one that is split later."""
    (split, *_) = found.describe().splitlines()
    words = split.split()
    return int(words[words.index("first") + 1])


def test_rows_of_the_founding_layers_trail() -> None:
    """On the SMs for which the waves have no tile: 4 of an H200's 132."""
    weights, samples = (1024, 8192, 8192), (16384, 4096, 4096)
    for size, tier in ((weights, "ieee"), (samples, "ieee"), (samples, "tf32")):
        found = plan(size, tier, "batch_norm_train")
        assert found.policy.trailing_blocks == 4
        of = "weight" if size == weights else "x"
        assert f"of {of} the first" in found.describe()
        assert "split the other rows on 4 SMs" in found.describe()
    assert first_row(plan(weights)) <= 7000
    assert first_row(plan(samples)) <= 2000


def test_what_has_its_planes_does_not_trail() -> None:
    assert plan((1024, 8192, 8192), frozen=True).policy.trailing_blocks == 0
    assert plan((16384, 4096, 4096), frozen=True).policy.trailing_blocks == 4  # but x
    for dtype in (torch.float16, torch.bfloat16):
        assert plan((1024, 8192, 8192), dtype=dtype).policy.trailing_blocks == 0


@pytest.mark.parametrize("size", [(1, 8192, 8192), (300, 300, 4096), (1024, 8192, 128)], ids=str)
def test_nothing_trails_where_little_is_gained(size: tuple[int, int, int]) -> None:
    for tier in TIERS:
        found = plan(size, tier)
        assert found.policy.trailing_blocks == 0
        assert "first" not in found.describe()


def test_nothing_trails_where_rows_are_too_long() -> None:
    assert plan((1024, 8192, 8200)).policy.trailing_blocks == 0
    assert plan((1024, 8192, 8190)).policy.trailing_blocks == 0


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"{device.sm_count}sm")
def test_the_first_wave_waits_for_nothing(size: Any, tier: str, device: Any) -> None:
    m, n, _ = size
    for tail in ("none", "batch_norm_train", "batch_norm_eval", "logsumexp"):
        found = plan(size, tier, tail, device=device)
        policy = found.policy
        if policy.trailing_blocks == 0:
            continue
        of_x = policy.raster == 1
        rows, tile = (m, policy.tile_m) if of_x else (n, policy.tile_n)
        others = math.ceil(n / policy.tile_n) if of_x else math.ceil(m / policy.tile_m)
        first = first_row(found)
        assert 0 < first < rows
        assert first % tile == 0
        blocks = device.sm_count - policy.trailing_blocks
        assert first >= min(rows, blocks // others * tile)


def test_more_blocks_leave_fewer_rows_to_split_before() -> None:
    size = (1024, 8192, 8192)
    few, more = (plan(size).policy for _ in range(2))
    few.trailing_blocks = 2
    assert more.trailing_blocks == 4
    assert first_row(plan(size, policy=more)) < first_row(plan(size, policy=few))


def test_a_pass_follows_blocks_that_wait_for_each_other_where_rows_trail() -> None:
    """Such a launch is not a cooperative one, which would begin when all rows are split."""
    stages = plan((1024, 8192, 8192), tail="batch_norm_train").describe()
    assert "split the other rows" in stages
    assert "wait for each other" in stages
    assert "a pass that merges and normalises, unless all blocks ran" in stages
    stages = plan((1024, 8192, 1024), tail="batch_norm_train").describe()
    assert "split the other rows" not in stages
    assert "wait for each other" in stages
    assert "a pass that" not in stages


@pytest.mark.parametrize("blocks", [-2, 1, 3, 132])
def test_a_forced_number_that_is_none_is_refused(blocks: int) -> None:
    policy = plan((1024, 8192, 8192)).policy
    policy.trailing_blocks = blocks
    with pytest.raises(ValueError, match=rf"{blocks}\}}: trailing blocks come in pairs"):
        plan((1024, 8192, 8192), policy=policy)


def test_it_is_refused_where_no_kernel_waits() -> None:
    for sizes in ((512, 512, 65), (512, 512, 8256)):
        policy = plan(sizes).policy
        policy.trailing_blocks = 2
        with pytest.raises(NotImplementedError, match="K at most 8192 and a multiple of 8"):
            plan(sizes, policy=policy)
    sm80 = next(p for p in _C.compiled_policies() if p.arch == 80 and p.promote_k)
    sm80.trailing_blocks = 2
    with pytest.raises(NotImplementedError, match="sm_90"):
        plan((512, 512, 512), policy=sm80)


@pytest.mark.parametrize("tail", ["none", "logsumexp"])
def test_of_a_chain_only_the_first_contraction_has_rows_to_split(tail: str) -> None:
    sigmoid = encode((pcf.sigmoid(),))
    m, n, k, last = 16384, 4096, 2048, 1024
    problems = (
        Problem(m, n, k, sigmoid, "none", EMPTY, "ieee", torch.float32, False, 0, 0, 0),
        Problem(m, last, n, EMPTY, tail, EMPTY, "ieee", torch.float32, False, 0, 0, 0),
    )
    stages = _C.make_chain(*map(fused_problem, problems), _C.DeviceProps()).describe()
    assert stages.count("split the other rows") == 1


def test_the_policy_names_them() -> None:
    policy = plan((1024, 8192, 8192)).policy
    assert repr(policy).endswith("DType::kFloat16, Source::kMatrix, 4}")
    same = plan((1024, 8192, 8192)).policy
    assert same == policy
    same.trailing_blocks = 0
    assert same != policy
