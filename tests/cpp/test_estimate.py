"""Who is expected to be faster is a pure function of the problem."""

import itertools
import math
from typing import Any

import pytest
import torch

import pycutfuse as pcf
from pycutfuse.bench import host
from pycutfuse.program import EMPTY, Encoded, encode
from pycutfuse.support import Problem, fused_problem
from pycutfuse.testing import small_policies
from pycutfuse.testing.forcing import KINDS, Kind

from .native import binding

_C = binding()

TAILS = ["none", "batch_norm_train", "batch_norm_eval", "logsumexp"]
SLOWER = "expected to be faster"


def slower(m: int, n: int, k: int, kind: Kind, tail: str = "none") -> str | None:
    """What the library says of a problem on an H200, which needs no GPU to be asked."""
    dtype, tier = kind
    leading = (0, 0) if dtype is torch.float32 else (8 * math.ceil(k / 8),) * 2
    problem = Problem(m, n, k, EMPTY, tail, EMPTY, tier, dtype, False, *leading, 0)
    reason: str | None = _C.why_slower(fused_problem(problem), _C.DeviceProps())
    return reason


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_a_tiny_problem_is_slower(kind: Kind, tail: str) -> None:
    for sizes in ((2, 1, 64), (2, 4, 64), (16, 16, 128)):
        assert SLOWER in str(slower(*sizes, kind, tail))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_a_large_problem_is_not(kind: Kind, tail: str) -> None:
    assert slower(16384, 4096, 4096, kind, tail) is None


@pytest.mark.parametrize("tail", ["none", "batch_norm_train"])
def test_the_hosts_overhead_is_measured_on_a_problem_that_is_ours(tail: str) -> None:
    m, k, n = host.SHAPE.sizes
    assert slower(m, n, k, (torch.float32, "ieee"), tail) is None


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_reason_has_the_sizes_and_both_times(kind: Kind) -> None:
    reason = str(slower(2, 4, 64, kind))
    assert reason.startswith("2x4x64 ")
    assert "us)" in reason


def plan(
    m: int,
    n: int,
    k: int,
    kind: Kind,
    tail: str = "none",
    policy: Any = None,
    after: Encoded = EMPTY,
    program: Encoded = EMPTY,
) -> Any:
    dtype, tier = kind
    leading = (0, 0) if dtype is torch.float32 else (8 * math.ceil(k / 8),) * 2
    problem = Problem(m, n, k, program, tail, after, tier, dtype, False, *leading, 0)
    return _C.make_plan(fused_problem(problem), _C.DeviceProps(), policy)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_few_rows_or_columns_take_no_tensor_cores(kind: Kind) -> None:
    for sizes in ((1, 4096, 4096), (16, 7000, 2520), (7000, 16, 2520)):
        found = plan(*sizes, kind)
        assert found.policy.arch == 0
        assert "few rows" in found.describe()
        assert "planes" not in found.describe()
        parts = found.policy.split_k
        assert 1 <= parts <= 16
        m, n, _ = sizes
        assert found.workspace_bytes >= 4 * m * n * parts
    for sizes in ((65, 7000, 2515), (7000, 65, 2515)):
        assert plan(*sizes, kind).policy.arch == 90


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_small_products_are_one_launch(kind: Kind) -> None:
    """Of policies that tests force, and of no other."""
    forced = [repr(policy) for policy in small_policies()]
    met = set()
    gelu = encode((pcf.gelu(),))
    sizes = itertools.product((1, 7, 60, 500, 5000), (1, 9, 70, 600, 6000), (1, 8, 50, 200, 3000))
    for m, n, k in sizes:
        found = plan(m, n, k, kind, program=gelu)
        if found.policy.arch == 90:
            assert k >= 64 or kind[0] is not torch.float32
            continue
        if found.policy.arch == 0:
            continue
        assert repr(found.policy) in forced
        assert found.workspace_bytes == 0
        text = found.describe()
        assert "without tensor cores, in tiles of" in text
        assert text.splitlines()[1:] == ["  epilogue: gelu_erf"]
        met.add(repr(found.policy))
    assert len(met) >= 3


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [
        *(((12, 143, 51), True), ((98, 3, 68), True), ((2470, 205, 1), True)),
        *(((326, 42, 267), True), ((17, 46, 205), True), ((2184, 4267, 4), True)),
        *(((64, 10, 2048), True), ((128, 128, 1024), True), ((32, 32, 16000), True)),
        *(((3620, 1564, 59), False), ((1, 474, 359), False), ((16, 33, 9787), False)),
    ],
    ids=str,
)
def test_small_products_that_are_taken(sizes: tuple[int, int, int], taken: bool) -> None:
    """By times of an H200: the tile's, and PyTorch's two launches for a bias and a gelu."""
    steps = encode((pcf.add(torch.zeros(1)), pcf.gelu()))
    problem = Problem(*sizes, steps, "none", EMPTY, "ieee", torch.float32, False, 0, 0, 0)
    reason = _C.why_slower(fused_problem(problem), _C.DeviceProps())
    assert (reason is None) == taken, reason


def test_what_small_policies_do_not_run_is_refused() -> None:
    kind, single = KINDS[0], small_policies()[0]
    assert plan(40, 40, 128, kind, policy=single).policy == single
    for sizes, tail in (((40, 40, 129), "none"), *(((40, 40, 64), tail) for tail in TAILS[1:])):
        with pytest.raises(NotImplementedError, match="fp32 units"):
            plan(*sizes, kind, tail, policy=single)
    for tile in ((0, 0), (64, 32), (128, 128)):
        with pytest.raises(NotImplementedError, match="no tile that is compiled"):
            plan(40, 40, 64, kind, policy=_C.GemmPolicy(*tile, arch=1))


@pytest.mark.parametrize("tier", ["ieee", "tf32"])
def test_short_sums_are_taken_unless_a_reduction_follows(tier: str) -> None:
    kind = (torch.float32, tier)
    for k in (1, 8, 63):
        assert plan(300, 200, k, kind).policy.arch == 1
        for tail in TAILS[1:]:
            with pytest.raises(NotImplementedError, match=f"K={k}: the accuracy promise"):
                plan(300, 200, k, kind, tail)
        for policy in _C.compiled_policies():
            with pytest.raises(NotImplementedError, match=f"K={k}: the accuracy promise"):
                plan(300, 200, k, kind, policy=policy)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_affine_steps_are_folded_once_for_many_tiles(kind: Kind) -> None:
    """And batch norm for few: its operands take longer to come than another launch."""
    many, few = (4096, 4096, 1024), (1024, 1024, 4096)
    bias = encode((pcf.add(torch.zeros(1)),))
    for tail in ("batch_norm_eval", "none"):
        assert "fold" in plan(*many, kind, tail, program=bias).describe()
        folds = "fold" in plan(*few, kind, tail, program=bias).describe()
        assert folds == (tail == "batch_norm_eval")
    assert "fold" in plan(*few, kind, "batch_norm_eval").describe()
    assert "fold" not in plan(*many, kind).describe()  # no step that it could fold


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_launch_that_runs_anyway_clears_the_counts_of_blocks(kind: Kind) -> None:
    bias = encode((pcf.add(torch.zeros(1)),))
    stages = plan(2048, 1020, 1024, kind, "batch_norm_train", program=bias).describe()
    splits = kind[0] is torch.float32
    (clears,) = [line for line in stages.splitlines() if "clear the counts" in line]
    assert clears.startswith("split" if splits else "fold")
    assert ("fold" in stages) != splits  # of one tile an SM, nothing else is folded ahead


@pytest.mark.parametrize("tier", ["ieee", "tf32"])
def test_a_chain_splits_both_weights_before_it_multiplies(tier: str) -> None:
    sigmoid = encode((pcf.sigmoid(),))
    problems = (
        Problem(1024, 4096, 2048, sigmoid, "none", EMPTY, tier, torch.float32, False, 0, 0, 0),
        Problem(1024, 1024, 4096, EMPTY, "logsumexp", EMPTY, tier, torch.float32, False, 0, 0, 0),
    )
    chain = _C.make_chain(*map(fused_problem, problems), _C.DeviceProps())
    begins = [line.split()[0] for line in chain.describe().splitlines() if not line[0].isspace()]
    assert begins == ["split", "split", "gemm", "gemm", "merge"]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_blocks_exchange_moments_where_columns_of_tiles_fit_a_wave(kind: Kind) -> None:
    def exchanges(m: int, n: int, after: tuple[pcf.Step, ...] = ()) -> bool:
        found = plan(m, n, 1024, kind, "batch_norm_train", after=encode(after))
        waits = "wait for each other" in found.describe()
        assert waits != ("normalise in place" in found.describe())
        assert not waits or found.policy.swizzle == 1
        return waits

    # Of 16 bits and more rows a pass reads whole vectors, of others turned layers exchange theirs.
    wide = kind[0] is torch.float32
    assert exchanges(1024, 8192)
    assert exchanges(2048, 8192) == wide
    assert exchanges(1024, 256) == wide
    assert exchanges(1024, 8188)
    assert exchanges(2, 100)
    assert exchanges(2048, 300, after=(pcf.relu(),))
    assert exchanges(300, 300, after=(pcf.clamp(-1.0, 1.0),))
    # Of a layer that is turned over 2049 rows are nine tiles.
    assert exchanges(2049, 8192) == (kind == (torch.float32, "tf32"))
    assert not exchanges(16384, 4096)
    assert not exchanges(1024, 8192, after=(pcf.sigmoid(),))
    assert not exchanges(1024, 8192, after=(pcf.relu(), pcf.mul(2.0)))
    assert exchanges(1024, 8188, after=(pcf.relu(), pcf.mul(1.0)))  # which changes nothing


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_an_empty_result_has_a_plan_and_an_estimate(kind: Kind, tail: str) -> None:
    n = 1 if tail == "logsumexp" else 0
    assert plan(4, n, 64, kind, tail).describe()
    slower(4, n, 64, kind, tail)


def test_reductions_and_forced_policies_keep_their_kernels() -> None:
    kind = KINDS[0]
    for tail in TAILS[1:]:
        assert plan(16, 700, 515, kind, tail).policy.arch == 90
    forced = _C.select_policy(4096, 4096, 4096, _C.DeviceProps(), 0)
    found = plan(16, 700, 515, kind, policy=forced)
    assert found.policy.arch == 90
    assert "few rows" not in found.describe()


@pytest.mark.parametrize("sizes", [(16, 4096, 4096), (8, 2370, 8888), (2654, 6, 16292)], ids=str)
def test_few_rows_are_taken_where_pytorch_has_no_tensor_cores(sizes: tuple[int, int, int]) -> None:
    ieee, tf32, half, _ = KINDS
    assert slower(*sizes, ieee) is None
    assert SLOWER in str(slower(*sizes, tf32))
    assert SLOWER in str(slower(*sizes, half))
    assert SLOWER in str(slower(1, *sizes[1:], ieee))  # of a vector cuBLAS reads as fast
