"""What is reported follows from the results, survives JSON, and lands between README's markers."""

import json
import math
from dataclasses import replace

import pytest

from pycutfuse.bench import plot, report, results
from pycutfuse.bench.accuracy import Check, Errors
from pycutfuse.bench.results import (
    COMPILE,
    COMPILE_TUNED,
    EAGER,
    EAGER_TF32,
    FROZEN,
    OURS,
    CaseResult,
    ExecutorResult,
    HostOverhead,
    Memory,
    Run,
)
from pycutfuse.bench.statistics import Summary
from pycutfuse.bench.timing import Timing

ENVIRONMENT = {
    "pycutfuse": "0.1.0",
    "torch": "2.11.0",
    "cuda": "13.0",
    "python": "3.12.0",
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "commit": "abc",
    "fp32_precision": {"matmul": "none", "cudnn.conv": "tf32"},
}


def _timing(seconds):
    return Timing(Summary(seconds, seconds * 0.9, seconds * 1.1, 10), "sustained")


def _check(error=1e-7):
    return Check("rand: output", Errors(error, error), Errors(4e-7, 4e-7), 2.0**-22)


def _case(**changes):
    case = CaseResult(
        name="linear.4x4-4.eval",
        chain="Linear",
        fused=True,
        ran="linear: fused (ieee)",
        shape=(16384, 4096, 4096),
        training=False,
        checks=[_check()],
        timings={
            EAGER: _timing(11.2e-3),
            EAGER_TF32: _timing(1.9e-3),
            COMPILE: _timing(10.9e-3),
            COMPILE_TUNED: _timing(10.95e-3),
            OURS: _timing(2.725e-3),
            FROZEN: _timing(2.5e-3),
        },
        memory=Memory(resident=100, eager=100, ours=150, planes=50),
        bytes=604_000_000,
        flop=2 * 16384 * 4096 * 4096,
        floor_s=2.356e-3,
        floor_kind="work",
        clocks={"sm_mhz": 1400.0},
    )
    return replace(case, **changes)


def _executor(*times):
    names = ("bias", "1", "4", "16")
    programs = [
        _case(name=f"executor.{name}.4x4-4", timings={OURS: _timing(seconds)})
        for name, seconds in zip(names, times, strict=True)
    ]
    return ExecutorResult("executor.4x4-4", programs)


def _run(*cases, **changes):
    host = HostOverhead(3e-6, 15e-6, 25e-6, 9e-6, 14e-6, "sm90")
    run = Run(ENVIRONMENT, "ieee", {"compile": True}, list(cases), [_executor(1, 1.01, 1.03, 1.2)])
    return replace(run, host=host, **changes)


def test_ratio_is_to_the_best_baseline_at_default_flags_and_not_to_tf32():
    case = _case()
    assert case.baseline == (COMPILE, 10.9e-3)
    assert case.speedup(OURS) == pytest.approx(4.0)
    assert "4.00x" in report.text(_run(case))


def test_rates_and_share_of_the_floor():
    figures = results.derived(_case())[OURS]
    assert figures["flop_per_s"] == pytest.approx(2 * 16384 * 4096 * 4096 / 2.725e-3)
    assert figures["share_of_floor"] == pytest.approx(2.356 / 2.725)
    assert "86%" in report.text(_run(_case()))


def test_peak_memory_beyond_what_is_allowed_is_flagged():
    assert "EXCEEDED" not in report.text(_run(_case()))
    too_much = Memory(resident=100, eager=100, ours=200, planes=50)
    assert "EXCEEDED" in report.text(_run(_case(memory=too_much)))


def test_executor_cost_is_relative_to_the_bias_alone():
    executor = _executor(2.0, 2.0, 2.06, 2.5)
    assert [executor.cost(p) for p in executor.programs] == pytest.approx([0, 0, 0.03, 0.25])
    assert "+3.0%" in report.text(_run(_case()))


def test_host_overhead_is_over_an_empty_launch():
    host = _run().host
    assert (host.no_grad, host.grad) == pytest.approx((12e-6, 22e-6))


def test_a_failed_case_is_named_and_shows_no_speed():
    failed = _case(name="broken", checks=[_check(1e-5)], timings={}, memory=None)
    run = _run(_case(), failed)
    assert not run.passed
    text = report.text(run)
    row = next(line for line in text.splitlines() if line.startswith("broken"))
    assert not any(character.isdigit() for character in row)
    assert text.splitlines()[-1].startswith("FAILED: 1 of 3 cases: broken")


def test_a_case_that_pytorch_ran_for_us_is_named():
    assert "no fused kernel" not in report.text(_run(_case()))
    other = _case(fused=False, ran="linear: hand-over (faster)\n  tier: ieee")
    assert "no fused kernel ran: linear: hand-over (faster)" in report.text(_run(other))


def test_a_case_without_checks_has_not_passed():
    assert not _case(checks=[]).passed


def test_json_round_trip_keeps_everything():
    odd = _case(checks=[_check(math.inf)], failures={COMPILE: "no compiler"}, timings={})
    run = _run(_case(), odd)
    text = results.to_json(run)
    assert results.from_json(text) == run
    assert json.loads(text)["cases"][0]["derived"][OURS]["speedup"] == pytest.approx(4.0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1}', "nonsense"])
def test_other_json_is_refused(text):
    with pytest.raises(ValueError, match=r"format|not a result"):
        results.from_json(text)


def test_readme_region_round_trip(tmp_path):
    run = results.from_json(results.to_json(_run(_case())))
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{report.BEGIN}\nold figures\n{report.END}\n\nThe end.\n")
    assert report.update_readme(readme, run)
    text = readme.read_text()
    assert text.startswith(f"# Title\n\n{report.BEGIN}\n")
    assert text.endswith(f"\n{report.END}\n\nThe end.\n")
    assert "old figures" not in text
    assert "| linear.4x4-4.eval | 11.20 | 1.900 | 10.90 | 10.95 | 2.725 |" in text
    assert not report.update_readme(readme, run)
    assert readme.read_text() == text


@pytest.mark.parametrize(
    "document",
    ["", report.BEGIN, f"{report.END}\n{report.BEGIN}", f"{report.BEGIN}{report.END}" * 2],
)
def test_a_document_without_the_region_is_refused(document):
    with pytest.raises(ValueError, match="results:"):
        report.update_region(document, "tables")


def test_every_row_has_all_columns():
    run = _run(_case(), _case(timings={}, memory=None, clocks=None))
    for table in report.tables(run):
        assert {len(row) for row in table.rows} == {len(table.columns)}, table.title


def test_bars_hold_milliseconds_of_timed_cases_only():
    partly = _case(name="train", timings={EAGER: _timing(2e-3), OURS: _timing(1e-3)})
    run = _run(_case(), _case(timings={}), partly)
    groups = plot.bars(run)
    assert plot.timed_cases(run) == ["linear.4x4-4.eval", "train"]
    assert groups[OURS] == pytest.approx([2.725, 1.0])
    assert groups[FROZEN][0] == pytest.approx(2.5)
    assert math.isnan(groups[FROZEN][1])
