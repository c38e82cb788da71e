"""Rows that are split while the first tiles are multiplied give the bits of rows split before."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import pycutfuse as pcf
from pycutfuse._loader import native
from pycutfuse.program import EMPTY
from pycutfuse.support import Problem, fused_problem
from pycutfuse.testing import forced_policy, generate, guarded, strided
from pycutfuse.testing.forcing import TURNED

pytestmark = pytest.mark.cuda

INF = float("inf")
# Of the weight and of x; several waves, an odd number of tiles, a last tile that is not whole.
SIZES = [(1024, 8192, 1024), (1000, 11007, 4096), (16384, 1024, 2048), (9000, 2000, 8192)]
TIERS = ["ieee", "tf32"]


def policies(size: tuple[int, int, int], tier: str, tail: str = "none") -> tuple[Any, Any]:
    """What splits all rows before, and what does not."""
    binding = native().binding
    assert binding is not None
    problem = Problem(*size, EMPTY, tail, EMPTY, tier, torch.float32, False, 0, 0, 0)
    device = binding.query_device(torch.cuda.current_device())
    found = binding.make_plan(fused_problem(problem), device, None).policy
    if found.source == TURNED:  # which splits no weight
        found = binding.select_policy(*size, device, int(tier == "tf32"))
        found.raster = 0
    plain, trails = (binding.make_plan(fused_problem(problem), device, found).policy for _ in "12")
    plain.trailing_blocks = 0
    trails.trailing_blocks = trails.trailing_blocks or 4
    return plain, trails


def bits(value: Tensor) -> Tensor:
    return value.view(torch.int32)


def compare(call: Callable[[], Tensor], plain: Any, trails: Any, times: int = 5) -> None:
    with forced_policy(plain):
        expected = call()
    with forced_policy(trails), guarded():
        for _ in range(times):
            assert torch.equal(bits(call()), bits(expected))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_linear(size: tuple[int, int, int], tier: str, fused: None) -> None:
    m, n, k = size
    x = generate("randn", (m, k), seed=1, device="cuda")
    weight = generate("lognormal", (n, k), seed=2, device="cuda")
    compare(partial(pcf.ops.linear, x, weight, precision=tier), *policies(size, tier))


@pytest.mark.parametrize("blocks", [2, 6, 16])
def test_any_number_of_blocks(blocks: int, fused: None) -> None:
    size = (1024, 8192, 2048)
    m, n, k = size
    x = generate("randn", (m, k), seed=1, device="cuda")
    weight = generate("randn", (n, k), seed=2, device="cuda")
    plain, trails = policies(size, "ieee")
    trails.trailing_blocks = blocks
    compare(partial(pcf.ops.linear, x, weight), plain, trails)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("size", [*SIZES[:2], (2048, 8192, 1024)], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("after", [(pcf.relu(),), (pcf.mul(2.0), pcf.relu())], ids=["relu", "both"])
def test_batch_norm(
    size: tuple[int, int, int],
    tier: str,
    training: bool,
    after: tuple[pcf.Step, ...],
    fused: None,
) -> None:
    """After bounds alone the blocks of a column exchange their moments meanwhile."""
    m, n, k = size
    x = generate("randn", (m, k), seed=1, device="cuda")
    weight = generate("randn", (n, k), seed=2, device="cuda")

    def call() -> Tensor:
        mean, var = torch.zeros(n, device="cuda"), torch.ones(n, device="cuda")
        norm = partial(pcf.ops.linear_batch_norm, x, weight, training=training, precision=tier)
        result: Tensor = norm(running_mean=mean, running_var=var, after=after)
        return torch.cat((result, mean[None], var[None]))

    tail = f"batch_norm_{'train' if training else 'eval'}"
    compare(call, *policies(size, tier, tail))


def test_blocks_that_cannot_all_run_leave_batch_norm_to_a_pass(fused: None) -> None:
    """Blocks of eight launches share the GPU."""
    m, n, k = 1024, 8192, 2048
    x = generate("randn", (m, k), seed=1, device="cuda")
    weight = generate("randn", (n, k), seed=2, device="cuda")
    plain, trails = policies((m, n, k), "ieee", "batch_norm_train")
    norm = partial(pcf.ops.linear_batch_norm, x, weight, training=True)
    with forced_policy(plain):
        expected = norm()
    with forced_policy(trails):
        norm()
        torch.cuda.synchronize()
        others = [torch.cuda.Stream() for _ in range(8)]
        for other in others:
            with torch.cuda.stream(other):
                torch.cuda._sleep(20_000_000)
        results = []
        for other in others:
            with torch.cuda.stream(other):
                results.append(norm())
        torch.cuda.synchronize()
    for result in results:
        assert torch.equal(bits(result), bits(expected))


@pytest.mark.parametrize("size", SIZES[1:3], ids=str)
def test_rows_that_are_not_finite_or_of_extreme_range(
    size: tuple[int, int, int], fused: None
) -> None:
    m, n, k = size
    x = generate("randn", (m, k), seed=1, device="cuda")
    weight = generate("randn", (n, k), seed=2, device="cuda")
    for one in (x, weight):
        one[-1, 3], one[-200, 5], one[-200, 7] = INF, INF, -INF
        one[-300] = 0.0
        one[-301] *= 2.0**100
        one[-302] *= 2.0**-120
        one[-303, -1] = float("nan")
    compare(partial(pcf.ops.linear, x, weight), *policies(size, "ieee"))


@pytest.mark.parametrize("layout", ["gapped", "offset", "transposed"])
def test_rows_that_cannot_be_read_so_are_split_before(layout: str, fused: None) -> None:
    size = (1024, 8192, 1024)
    m, n, k = size
    x = generate("randn", (m, k), seed=1, device="cuda")
    weight = strided(generate("randn", (n, k), seed=2, device="cuda"), layout)
    plain, trails = policies(size, "ieee")
    with forced_policy(plain):
        expected = pcf.ops.linear(x, weight.contiguous())
    with forced_policy(trails):
        assert torch.equal(pcf.ops.linear(x, weight), expected)


def test_replays_count_anew(fused: None) -> None:
    size = (1024, 8192, 2048)
    m, n, k = size
    x = generate("randn", (m, k), seed=1, device="cuda")
    weight = generate("randn", (n, k), seed=2, device="cuda")
    plain, trails = policies(size, "ieee")
    with forced_policy(trails):
        pcf.ops.linear(x, weight)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = pcf.ops.linear(x, weight)
    for seed in range(3):
        weight.copy_(generate("randn", (n, k), seed=10 + seed, device="cuda"))
        graph.replay()
        graph.replay()
        with forced_policy(plain):
            assert torch.equal(result, pcf.ops.linear(x, weight))
