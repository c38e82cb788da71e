"""Every case's fused module computes its chain, and can be chosen by name."""

from dataclasses import replace

import pytest
import torch

from pycutfuse.bench import cases, floors
from pycutfuse.bench.cases import CASES, Case, ExecutorCase, Shape
from pycutfuse.bench.floors import linear_work
from pycutfuse.bench.runner import Options, run_case, run_executor

PROGRAMS = [
    program
    for case in CASES
    for program in (case.programs if isinstance(case, ExecutorCase) else (case,))
]
CPU = torch.device("cpu")


def test_names_are_unique():
    names = [case.name for case in (*CASES, *PROGRAMS)]
    assert len(set(names)) == len(CASES) + sum(p not in CASES for p in PROGRAMS)


def test_both_founding_shapes_are_there_in_both_modes():
    chosen = cases.select(["linear_scale_batch_norm.*"])
    assert {(case.shape, case.training) for case in chosen} == {
        (shape, training)
        for shape in (Shape(16384, 4096, 4096), Shape(1024, 8192, 8192))
        for training in (True, False)
    }
    assert all(case.can_freeze is not case.training for case in chosen)


def test_selection_by_pattern():
    assert cases.select([]) == list(CASES)
    assert [c.name for c in cases.select(["*.eval", "executor.1024*"])] == [
        "linear_scale_batch_norm.16384x4096-4096.eval",
        "linear_scale_batch_norm.1024x8192-8192.eval",
        "executor.1024x8192-8192",
    ]
    with pytest.raises(ValueError, match="no such case"):
        cases.select(["linear_gelu*", "conv2d"])


@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.name)
def test_fused_module_computes_the_chain(case):
    torch.manual_seed(0)
    shape = Shape(9, 17, 13)
    reference = case.reference(shape).train(case.training)
    fused = case.fused(reference)
    assert fused.training is case.training
    x = torch.randn(shape.m, shape.k)
    torch.testing.assert_close(fused(x), reference(x))


@pytest.mark.parametrize("case", [c for c in CASES if isinstance(c, ExecutorCase)], ids=str)
def test_programs_have_the_steps_that_their_names_say(case):
    for program in case.programs:
        fused = program.fused(program.reference(Shape(2, 3, 4)))
        steps = len(fused.epilogue) + (fused.bias is not None)
        assert steps == {"bias": 1, "1": 1, "4": 4, "16": 16}[program.name.split(".")[1]]


def test_a_case_whose_replacement_is_wrong_fails():
    case = cases.select(["linear_gelu.2048*"])[0].reduced()
    assert isinstance(case, Case)

    def wrong(reference):
        with torch.no_grad():
            other = case.reference(case.shape)
            other.load_state_dict(reference.state_dict())
            other.linear.weight.mul_(1 + 1e-4)
        return case.fused(other)

    assert run_case(case, Options(), CPU).passed
    result = run_case(replace(case, fused=wrong), Options(), CPU)
    assert not result.passed
    assert result.error_ratio > 10
    assert result.timings == {}


def test_executor_programs_are_verified_on_the_cpu():
    case = next(c for c in CASES if isinstance(c, ExecutorCase)).reduced()
    result = run_executor(case, Options(), CPU)
    assert result.passed
    assert len(result.programs) == 4
    assert all(program.checks and not program.timings for program in result.programs)


def test_floors_are_those_of_performance_md():
    big = linear_work(16384, 4096, 4096, 4 * 4096 * 4096)
    assert big.floor("ieee") == (pytest.approx(2.356e-3, rel=1e-3), "work")
    thin = linear_work(16384, 64, 4096, 4 * 64 * 4096)
    seconds, kind = thin.floor("ieee")
    assert kind == "bytes"
    assert seconds == pytest.approx(4 * (16384 * 64 + 16384 * 4096 + 64 * 4096) / 4.3e12)
    assert floors.PRODUCTS["ieee"] == 3
