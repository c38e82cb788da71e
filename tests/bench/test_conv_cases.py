"""The cases of convolutions are the founding problems, verified and replaced in both formats."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pycutfuse.bench import cases, runner
from pycutfuse.bench.accuracy import Check
from pycutfuse.bench.case import Case
from pycutfuse.bench.runner import Options, run_case
from pycutfuse.bench.shapes import ConvShape
from pycutfuse.bench.tiers import TIERS

PROBLEMS = Path(__file__).parents[2] / "benchmarks" / "problems"
NAMES = [
    "conv2d",
    "conv_transpose2d",
    "conv2d_batch_norm_scale_train",
    "conv2d_batch_norm_scale_eval",
]
CASES = cases.select([*NAMES, *(f"{name}_channels_last" for name in NAMES)])
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::pycutfuse.FallbackWarning")

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def _last(name):
    return name.endswith("_channels_last")


def _small(case):
    shape = replace(case.shape, batch=2, height=13, width=15)
    return replace(case, shape=shape)


def test_each_problem_is_chosen_by_its_name_alone():
    assert [case.name for case in cases.select(["conv2d"])] == ["conv2d"]
    assert [case.name for case in CASES] == [*NAMES, *(f"{name}_channels_last" for name in NAMES)]
    (sizes,) = cases.select(["conv_sizes"])
    assert (sizes.count, sizes.family, sizes.compiled) == (24, "conv2d", 0)
    assert all(cases.runs_at(case, tier) for case in (*CASES, sizes) for tier in TIERS)


@every_case
def test_shapes_and_parameters_are_those_of_the_founding_problem(case, monkeypatch):
    name = case.name.removesuffix("_channels_last").removesuffix("_train").removesuffix("_eval")
    spec = importlib.util.spec_from_file_location(name, PROBLEMS / f"{name}.py")
    problem = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(problem)
    monkeypatch.setattr(torch, "rand", lambda *size: torch.empty(size, device="meta"))
    (x,) = problem.get_inputs()
    assert tuple(x.shape) == case.shape.input_size
    with torch.device("meta"):
        theirs = problem.Model(*problem.get_init_inputs())
        ours = case.reference(case.shape)
        shape = theirs(x).shape
    assert case.shape.output_size == tuple(shape)
    assert [tuple(p.shape) for p in theirs.parameters()] == [
        tuple(p.shape) for p in ours.parameters()
    ]
    factors = [getattr(module, "scaling_factor", None) for module in (theirs, ours)]
    assert factors[0] == factors[1]


@every_case
def test_fused_module_computes_the_chain_in_the_same_format(case):
    case = _small(case)
    reference = runner.make_reference(case, TIERS["ieee"], CPU)
    fused = case.fused(reference)
    assert fused.training is reference.training is case.training
    (inputs,) = runner.make_inputs(case.shape, TIERS["ieee"], CPU, 1)
    ours, theirs = fused(*inputs), reference(*inputs)
    torch.testing.assert_close(ours, theirs)
    assert ours.stride() == theirs.stride()


@every_case
def test_inputs_and_weights_have_the_format_of_the_case(case):
    case = _small(case)
    reference = runner.make_reference(case, TIERS["bf16"], CPU)
    (inputs,) = runner.make_inputs(case.shape, TIERS["bf16"], CPU, 1)
    drawn = runner.draw_input(case.shape, "randn", TIERS["bf16"], torch.Generator())
    weights = [p for m in (reference, case.fused(reference)) for p in m.parameters() if p.ndim == 4]
    assert len(weights) == 2
    for tensor in (*inputs, drawn, *weights):
        assert tensor.is_contiguous(memory_format=torch.channels_last) is _last(case.name)
        assert tensor.is_contiguous() is not _last(case.name)


def test_batch_norm_of_both_modules_differs_from_initial_values_and_is_not_shared():
    case = _small(CASES[2])
    reference = runner.make_reference(case, TIERS["ieee"], CPU)
    assert reference.bn.running_mean.ne(0).all()
    before = reference.bn.running_mean.clone()
    fused = case.fused(reference)
    fused(torch.randn(case.shape.input_size))
    assert torch.equal(reference.bn.running_mean, before)
    assert not torch.equal(fused.bn.running_mean, before)


@every_case
@pytest.mark.parametrize("tier", TIERS)
def test_every_case_is_verified_at_every_tier(case, tier):
    found = run_case(_small(case), Options(tier=tier), CPU)
    assert found.passed, [check for check in found.checks if not check.passed]
    allowed = "tf32" if tier == "tf32" else "ieee"
    assert found.fp32_precision == {"matmul": allowed, "cudnn.conv": allowed}
    assert found.shape == str(_small(case).shape)


def test_a_case_whose_replacement_is_wrong_fails():
    case = _small(CASES[0])

    def wrong(reference):
        other = case.fused(runner.make_reference(case, TIERS["ieee"], CPU))
        other.load_state_dict(reference.state_dict())
        with torch.no_grad():
            other.weight.mul_(1 + 1e-4)
        return other

    found = run_case(replace(case, fused=wrong), Options(), CPU)
    assert not found.passed
    assert found.error_ratio > 10


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d"])
def test_the_whole_batch_is_verified(name):
    (case,) = cases.select([name])
    case = _small(case)

    def wrong(reference):
        class Wrong(nn.Module):
            def forward(self, x):
                y = reference(x)
                y[-1, -1, -1, -1] += 1.0
                return y

        return Wrong().eval()

    assert not run_case(replace(case, fused=wrong), Options(tier="tf32"), CPU).passed


@pytest.mark.parametrize(
    ("name", "tier", "milliseconds", "kind"),
    [
        ("conv2d", "tf32", 0.105, "bytes"),
        ("conv_transpose2d", "tf32", 0.250, "bytes"),
        ("conv_transpose2d", "ieee", 0.331, "work"),
        ("conv2d_batch_norm_scale_train", "tf32", 0.137, "bytes"),
        ("conv2d_batch_norm_scale_eval", "ieee", 0.137, "bytes"),
    ],
)
def test_floors_are_those_of_performance_md(name, tier, milliseconds, kind):
    (case,) = cases.select([name])
    seconds, decides = case.work(0, 4).floor(tier)
    assert (seconds * 1e3, decides) == (pytest.approx(milliseconds, rel=5e-3), kind)


@every_case
def test_sizes_and_operations_are_those_that_torch_counts(case):
    case = _small(case)
    x = torch.rand(case.shape.input_size)
    counter = FlopCounterMode(display=False)
    with counter:
        y = case.reference(case.shape)(x)
    assert tuple(y.shape) == case.shape.output_size
    assert counter.get_total_flops() == case.shape.flop


def test_without_a_gpu_images_are_fewer_and_smaller_but_filters_are_the_same():
    for case in CASES:
        small = case.reduced().shape
        assert min(small.output_size) > 0
        assert small.flop < 1e9
        assert replace(small, batch=1, height=1, width=1) == replace(
            case.shape, batch=1, height=1, width=1
        )
    assert ConvShape(1, 1, 9, 9, 1, kernel=5).reduced() == ConvShape(1, 1, 5, 5, 1, kernel=5)


def test_a_convolutions_peak_may_not_exceed_eagers():
    (linear,) = cases.select(["linear_gelu.2048*"])
    assert isinstance(linear, Case)
    assert linear.memory_slack == 1.1
    assert {case.memory_slack for case in CASES} == {1.01}


def test_float64_runs_without_cudnn_and_the_modules_with_it():
    seen = {}

    class Seen(nn.Conv2d):
        def forward(self, x):
            seen[x.dtype] = torch.backends.cudnn.enabled
            return super().forward(x)

    case = replace(
        _small(CASES[0]), reference=lambda at: Seen(3, 4, 3), fused=lambda module: module
    )
    checks = runner._verify(case, "rand", Options(), CPU)
    assert all(isinstance(check, Check) for check in checks)
    assert seen == {torch.float64: False, torch.float32: True}
    assert torch.backends.cudnn.enabled
