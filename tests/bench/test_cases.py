"""Every case's fused module computes its chain, and can be chosen by name."""

from dataclasses import replace

import pytest
import torch

from pycutfuse.bench import cases, route, runner
from pycutfuse.bench.case import Case, ExecutorCase, ForcedCase, SizesCase
from pycutfuse.bench.cases import CASES
from pycutfuse.bench.floors import planes_bytes
from pycutfuse.bench.results import CaseResult
from pycutfuse.bench.runner import Options, run_case, run_executor
from pycutfuse.bench.shapes import Shape

SINGLE = [case for case in CASES if isinstance(case, Case) and isinstance(case.shape, Shape)]
PROGRAMS = [
    *SINGLE,
    *(program for case in CASES if isinstance(case, ExecutorCase) for program in case.programs),
]
SMALL = {3: Shape(9, 17, 13), 4: Shape(9, 17, 13, 11)}
CPU = torch.device("cpu")


def test_names_are_unique():
    names = [case.name for case in (*CASES, *PROGRAMS)]
    assert len(set(names)) == len(CASES) + sum(p not in CASES for p in PROGRAMS)


def test_what_the_speed_table_needs_is_chosen_by_three_patterns():
    chosen = cases.select(["linear_s*", "sizes", "sm80"])
    assert [type(case) for case in chosen] == [Case] * 5 + [SizesCase, ForcedCase]
    assert chosen[4].name == "linear_sigmoid_linear_logsumexp.16384x2048-4096-1024"
    assert (chosen[5].count, chosen[5].largest, chosen[5].compiled) == (100, 16384, 12)
    for tier in ("tf32", "fp16", "bf16"):
        assert [cases.runs_at(case, tier) for case in chosen] == [True] * 6 + [False]


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
        cases.select(["linear_gelu*", "conv9d"])


@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.name)
def test_fused_module_computes_the_chain(case):
    torch.manual_seed(0)
    shape = SMALL[len(case.shape.sizes)]
    reference = case.reference(shape).train(case.training)
    fused = case.fused(reference)
    assert fused.training is case.training
    x = torch.randn(shape.m, shape.k)
    torch.testing.assert_close(fused(x), reference(x))


EXECUTOR = [case for case in CASES if isinstance(case, ExecutorCase)]


@pytest.mark.parametrize("case", EXECUTOR, ids=lambda case: case.name)
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


@pytest.mark.parametrize("case", SINGLE, ids=lambda case: case.name)
@pytest.mark.parametrize("tier", ["tf32", "fp16", "bf16"])
def test_every_case_is_verified_at_every_tier(case, tier):
    small = replace(case, shape=SMALL[len(case.shape.sizes)])
    result = run_case(small, Options(tier=tier), CPU)
    assert result.passed, [check for check in result.checks if not check.passed]
    assert (result.tier, result.path) == (tier, route.FALLBACK)
    assert {check.limit for check in result.checks} <= {Options(tier=tier).at.limit, 2.0**-22}
    assert result.timings == {}


@pytest.mark.parametrize(
    ("passed", "path"), [(False, route.FUSED), (True, route.FALLBACK), (True, route.HAND_OVER)]
)
def test_what_failed_or_pytorch_ran_is_not_timed(passed, path, monkeypatch):
    case = SINGLE[0].reduced()
    found = run_case(case, Options(), CPU)
    checks = found.checks if passed else []
    monkeypatch.setattr(
        runner, "verified", lambda *_: replace(found, checks=checks, path=path, ran="why")
    )
    monkeypatch.setattr(runner, "_timed", lambda *_: pytest.fail("it was timed"))
    assert run_case(case, Options(), torch.device("cuda")).timings == {}


def test_what_passed_on_our_kernels_is_timed(monkeypatch):
    found = CaseResult("a", "b", "1x2-3", False, [])
    checks = run_case(SINGLE[0].reduced(), Options(), CPU).checks
    found = replace(found, checks=checks, path=route.FUSED)
    monkeypatch.setattr(runner, "verified", lambda *_: found)
    monkeypatch.setattr(runner, "_timed", lambda case, result, *_: replace(result, floor_s=1.0))
    assert run_case(SINGLE[0], Options(), torch.device("cuda")).floor_s == 1.0


def test_floors_are_those_of_performance_md():
    big = cases.at_shape(16384, 4096, 4096).work(4 * 4096 * 4096, 4)
    assert big.floor("ieee") == (pytest.approx(2.356e-3, rel=1e-3), "work")
    assert big.floor("tf32") == (pytest.approx(2.356e-3 / 3, rel=1e-3), "work")
    thin = cases.at_shape(16384, 4096, 64).work(4 * 64 * 4096, 4)
    seconds, kind = thin.floor("ieee")
    assert kind == "bytes"
    assert seconds == pytest.approx(4 * (16384 * 64 + 16384 * 4096 + 64 * 4096) / 4.3e12)
    parameters = 4 * (2048 * 4096 + 4096 + 4096 * 1024 + 1024)
    assert SINGLE[4].shape == cases.LOGSUMEXP
    work = SINGLE[4].work(parameters, 4)
    assert work.floor("ieee") == (pytest.approx(1.77e-3, rel=2e-3), "work")
    assert work.bytes == 4 * (16384 * 2048 + 16384) + parameters


def test_planes_are_those_that_the_split_makes():
    contractions = [(5, 3, 17), (5, 2, 3)]
    rows = 8 + 4 + 8 + 4  # of 5, 3, 5 and 2, each rounded up to 4 words
    assert planes_bytes(contractions, 2) == 2 * 2 * (8 * 24 + 7 * 8) + 4 * rows
    assert planes_bytes(contractions, 1) == 2 * (8 * 24 + 7 * 8) + 4 * rows
    assert planes_bytes(contractions, 0) == 0
