"""The way from a verified case to its figures, on a pretended GPU: calls run on the CPU."""

import math
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pycutfuse.bench import forced, replay, route, runner, sizes, timing, usage
from pycutfuse.bench.case import ExecutorCase, ForcedCase, SizesCase
from pycutfuse.bench.cases import CASES, select
from pycutfuse.bench.results import (
    COMPILE,
    COMPILE_TUNED,
    EAGER,
    EAGER_TF32,
    FROZEN,
    OURS,
)
from pycutfuse.bench.route import Route
from pycutfuse.bench.runner import Options
from pycutfuse.bench.shapes import ConvShape, Shape
from pycutfuse.bench.tiers import TIERS
from pycutfuse.bench.timing import Settings

CPU = torch.device("cpu")
PATTERNS = ["*.1024x8192-8192.train", "linear_sigmoid*", "*gelu.2048*"]
PATTERNS += ["conv_transpose2d", "conv2d_batch_norm_scale_train_channels_last"]
SHORT = Settings(slice_s=0.0, rounds=1)
pytestmark = pytest.mark.filterwarnings("ignore::pycutfuse.FallbackWarning")


class PretendedGpu:
    """The part of torch.cuda that times things; at least a millisecond passes."""

    now = 0.0

    class Event:
        def __init__(self, enable_timing):
            PretendedGpu.now += 1e-3

        def record(self):
            self.at = PretendedGpu.now

        def elapsed_time(self, end):
            return max(1.0, (end.at - self.at) * 1e3)

    def synchronize(self):
        pass

    def _sleep(self, cycles):
        pass


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(timing, "_cuda", PretendedGpu())
    monkeypatch.setattr(timing, "ROTATED_BYTES", 1)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(usage.environment, "clocks", lambda: {"sm_mhz": 1.0})
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(replay, "capture", lambda call, calls: call)
    # Only what PyTorch had no part in is timed, and here it computes everything.
    monkeypatch.setattr(route, "observe", lambda module, inputs: Route(route.FUSED, "", "said"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are tiny
    yield
    torch.set_num_threads(threads)


def _small(pattern):
    (case,) = select([pattern])
    if isinstance(case.shape, ConvShape):
        return replace(case, shape=replace(case.shape, batch=1, height=12, width=13))
    return replace(case, shape=Shape(*(8 + i for i in range(len(case.shape.sizes)))))


def _timed(case, **options):
    given = Options(settings=SHORT, **options)
    return runner._timed(case, runner.verified(case, given, CPU, ["rand"]), given, CPU)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_columns_of_a_tier(gpu, tier, pattern):
    case = _small(pattern)
    result = _timed(case, tier=tier)
    expected = {EAGER, COMPILE, COMPILE_TUNED, OURS}
    assert set(result.timings) == expected | ({EAGER_TF32} if tier == "ieee" else set())
    assert result.failures == {}
    assert result.clocks == {"sm_mhz": 1.0}
    planes = TIERS[tier].planes
    assert (result.memory.planes > 0) is (planes > 0 and isinstance(case.shape, Shape))
    assert result.memory.slack == case.memory_slack
    assert result.memory.resident > math.prod(case.shape.input_size) * TIERS[tier].itemsize


@pytest.mark.parametrize(
    ("options", "columns"),
    [({"compile": False}, set()), ({"tuned": False}, {COMPILE}), ({}, {COMPILE, COMPILE_TUNED})],
)
def test_what_is_not_compiled_has_no_column(gpu, options, columns):
    result = _timed(_small("linear_gelu.2048*"), tier="bf16", **options)
    assert set(result.timings) == {EAGER, OURS} | columns


@pytest.mark.parametrize("pattern", ["linear_gelu.2048*", "conv2d"])
def test_every_variant_runs_at_the_flags_of_its_tier(gpu, monkeypatch, pattern):
    case = _small(pattern)
    seen = []

    def sample(call, slice_s):
        flags = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        seen.append({("high", True): "tf32", ("highest", False): "ieee"}[flags])
        return [1.0], "fake"

    monkeypatch.setattr(timing, "sample_cuda", sample)
    monkeypatch.setattr(runner, "verified", lambda *_: SimpleNamespace(passed=True, fused=True))
    monkeypatch.setattr(runner, "replace", lambda result, **changes: changes)
    monkeypatch.setattr(runner, "make_inputs", lambda *_: [(torch.rand(case.shape.input_size),)])
    for tier, expected in (("tf32", ["tf32"] * 2), ("ieee", ["ieee", "tf32", "ieee"])):
        seen.clear()
        device = SimpleNamespace(type="cuda")
        monkeypatch.setattr(runner, "make_reference", lambda *_: case.reference(case.shape).eval())
        options = Options(tier, compile=False, settings=SHORT)
        found = runner.run_case(case, options, device)
        assert seen == expected
        assert len(found["timings"]) == len(expected)


def test_a_compile_that_fails_is_reported_and_the_others_are_timed(gpu, monkeypatch):
    def compiled(function, **options):
        def fail(*_):
            raise RuntimeError("no compiler")

        return fail if options else function

    monkeypatch.setattr(torch, "compile", compiled)
    result = _timed(_small("linear_gelu.2048*"), tier="bf16")
    assert result.failures == {COMPILE_TUNED: "RuntimeError: no compiler"}
    assert set(result.timings) == {EAGER, COMPILE, OURS}


def test_a_frozen_module_that_pytorch_runs_has_no_column(gpu, monkeypatch):
    monkeypatch.setattr(runner, "holds_planes", lambda module: True)
    result = _timed(_small("linear_gelu.2048*"), tier="tf32")
    assert FROZEN not in result.timings
    assert result.failures[FROZEN].startswith("fallback (")


def test_programs_are_timed(gpu):
    case, shape = next(c for c in CASES if isinstance(c, ExecutorCase)), Shape(8, 9, 10)
    programs = tuple(replace(program, shape=shape) for program in case.programs)
    case = replace(case, shape=shape, programs=programs)
    given = Options(settings=SHORT)
    results = [runner.verified(program, given, CPU, ["rand"]) for program in case.programs]
    results = runner._time_programs(case, results, given, CPU)
    assert all(OURS in result.timings for result in results)


def test_forced_policies_are_timed_with_the_policy_in_place(gpu, monkeypatch):
    entered = []

    @contextmanager
    def forced_policy(policy):
        entered.append(policy)
        yield

    monkeypatch.setattr(forced, "forced_policy", forced_policy)
    case, given = ForcedCase("sm80", Shape(8, 8, 8), 80), Options(settings=SHORT)
    result = forced._run("name", case, "policy", given, CPU)
    assert set(result.timings) == {EAGER, OURS}
    assert result.passed
    assert entered.count("policy") == 3  # verified, warm, timed


@pytest.mark.parametrize(
    ("family", "mode", "compiled"),
    [
        ("linear", sizes.TUNED, {COMPILE_TUNED}),
        ("conv2d", None, set()),
        ("resnet50", sizes.DEFAULT, {COMPILE}),
    ],
)
def test_sizes_are_timed(gpu, family, mode, compiled):
    (case,) = sizes.problems(
        replace(SizesCase("sizes", 1, 64, 1, family=family).reduced(), count=1)
    )
    case = case.reduced() if family == "resnet50" else case
    reference = runner.make_reference(case, TIERS["bf16"], CPU)
    (x,) = runner.make_inputs(case.shape, TIERS["bf16"], CPU, 1)[0]
    with torch.no_grad():
        result = sizes._timed(sizes.SizeResult("size", []), reference, x, case.fused, mode)
    assert set(result.times) == {EAGER, OURS} | compiled
    assert result.regime == replay.REPLAY
