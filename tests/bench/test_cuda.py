"""On a GPU: times are plausible, cases are timed by every variant, overhead is measured."""

import pytest
import torch

from pycutfuse.bench import cases, environment, timing
from pycutfuse.bench.cases import Case, ExecutorCase
from pycutfuse.bench.host import host_overhead
from pycutfuse.bench.results import EAGER, EAGER_TF32, FROZEN, OURS
from pycutfuse.bench.runner import Options, run_case, run_executor
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
    result = run_case(case.reduced(), QUICK, torch.device("cuda"))
    assert result.passed
    expected = {EAGER, EAGER_TF32, OURS} | ({FROZEN} if mode == "eval" else set())
    assert set(result.timings) == expected
    assert result.memory is not None
    assert result.memory.ours > 0
    assert result.memory.eager >= 4 * result.shape[0] * result.shape[2]


def test_programs_are_timed_side_by_side():
    case = next(c for c in cases.CASES if isinstance(c, ExecutorCase)).reduced()
    result = run_executor(case, QUICK, torch.device("cuda"))
    assert result.passed
    assert all(result.cost(program) is not None for program in result.programs)


def test_host_overhead_is_positive_and_below_a_millisecond():
    host = host_overhead(torch.device("cuda"), repeats=5)
    for seconds in (host.empty_launch, host.ours_no_grad, host.eager_no_grad, host.grad):
        assert 0 < seconds < 1e-3


def test_the_gpu_and_its_driver_are_named():
    found = environment.describe()
    assert found["gpu"] == torch.cuda.get_device_name()
    assert found["driver"] is None or found["driver"][0].isdigit()
