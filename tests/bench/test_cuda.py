"""On a GPU: times are plausible, cases are timed by every variant, overhead is measured."""

import math
from dataclasses import replace

import pytest
import torch

from pycutfuse.bench import cases, environment, timing, usage
from pycutfuse.bench.case import Case, ExecutorCase, SizesCase
from pycutfuse.bench.host import host_overhead
from pycutfuse.bench.results import EAGER, EAGER_TF32, FROZEN, OURS
from pycutfuse.bench.runner import Options, run_case, run_executor, verified
from pycutfuse.bench.shapes import Shape
from pycutfuse.bench.sizes import run_sizes
from pycutfuse.bench.timing import Settings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

QUICK = Options(compile=False, settings=Settings(slice_s=0.02, rounds=2))


@pytest.mark.parametrize(("size", "regime"), [(2**12, "backlog"), (2**28, "sustained")])
def test_a_copy_is_timed_within_what_memory_can_do(size, regime):
    source = torch.rand(size, device="cuda")
    target = torch.empty_like(source)
    samples, found = timing.sample_cuda(lambda: target.copy_(source), 0.02)
    assert found == regime
    seconds = sorted(samples)[len(samples) // 2]
    assert 2 * source.nbytes / seconds < 30e12
    assert seconds < 0.1


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_case_is_timed_by_every_variant_of_its_mode(mode):
    case = cases.select([f"linear_scale_batch_norm.16384*.{mode}"])[0]
    assert isinstance(case, Case)
    result = run_case(replace(case, shape=Shape(2048, 512, 512)), QUICK, torch.device("cuda"))
    assert result.passed
    assert result.fused, result.ran
    expected = {EAGER, EAGER_TF32, OURS} | ({FROZEN} if mode == "eval" else set())
    assert set(result.timings) == expected
    assert result.memory is not None
    assert result.memory.ours > 0
    assert result.memory.eager >= 4 * 2048 * 512


def test_programs_are_timed_side_by_side():
    shape = Shape(2048, 512, 512)
    case = next(c for c in cases.CASES if isinstance(c, ExecutorCase))
    case = replace(case, programs=tuple(replace(p, shape=shape) for p in case.programs))
    result = run_executor(replace(case, shape=shape), QUICK, torch.device("cuda"))
    assert result.passed
    assert all(result.cost(program) is not None for program in result.programs)


@pytest.mark.parametrize("tier", ["tf32", "fp16", "bf16"])
def test_other_tiers_have_one_eager_column_and_only_time_our_kernels(tier):
    case = cases.select(["linear_scale_batch_norm.1024*.eval"])[0]
    assert isinstance(case, Case)
    options = Options(tier, compile=False, settings=QUICK.settings)
    result = run_case(case.reduced(), options, torch.device("cuda"))
    assert result.passed
    assert EAGER_TF32 not in result.timings
    assert (OURS in result.timings) is result.fused


def test_random_sizes_are_timed_by_graph_replay():
    case = SizesCase("sizes", count=6, largest=512, compiled=0)
    found = run_sizes(case, QUICK, torch.device("cuda"))
    assert found.passed, found
    assert len(found.ratios()) == 6
    assert {entry.regime for entry in found.entries} == {"graph replay"}


@pytest.mark.parametrize("tier", ["tf32", "ieee"])
@pytest.mark.parametrize(
    "name", ["conv2d", "conv_transpose2d", "conv2d_batch_norm_scale_train_channels_last"]
)
def test_a_convolution_is_timed_by_every_variant(name, tier):
    (case,) = cases.select([name])
    shape = replace(case.shape, batch=4)
    options = replace(QUICK, tier=tier)
    result = run_case(replace(case, shape=shape), options, torch.device("cuda"))
    assert result.passed, [check for check in result.checks if not check.passed]
    assert result.fp32_precision == {"matmul": tier, "cudnn.conv": tier}
    if result.fused:
        expected = {EAGER, OURS} | ({EAGER_TF32} if tier == "ieee" else set())
        assert set(result.timings) == expected | (set() if case.training else {FROZEN})
        assert result.memory.eager >= 4 * math.prod(shape.output_size)


def test_verifying_the_largest_case_holds_no_more_than_40_gigabytes():
    (case,) = cases.select(["conv2d_batch_norm_scale_train"])
    usage.release()
    torch.cuda.reset_peak_memory_stats()
    verified(case, QUICK, torch.device("cuda"), ["rand"])
    assert torch.cuda.max_memory_reserved() < 40e9


@pytest.mark.parametrize("name", ["conv_sizes", "conv_breadth"])
def test_random_convolutions_are_timed_by_graph_replay(name):
    (case,) = cases.select([name])
    found = run_sizes(replace(case, count=4, largest=2**22), QUICK, torch.device("cuda"))
    assert found.passed, found
    assert len(found.ratios()) == 4
    assert {entry.regime for entry in found.entries} == {"graph replay"}


@pytest.mark.hands_over
def test_host_overhead_is_positive_and_below_a_millisecond():
    for host in host_overhead(torch.device("cuda"), repeats=5):
        assert ": fused" in host.ran
        for seconds in (host.empty_launch, host.ours_no_grad, host.eager_no_grad, host.grad):
            assert 0 < seconds < 1e-3


def test_the_gpu_and_its_driver_are_named():
    found = environment.describe()
    assert found["gpu"] == torch.cuda.get_device_name()
    assert found["driver"] is None or found["driver"][0].isdigit()
