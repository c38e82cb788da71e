"""What is reported follows from the results, survives JSON, and lands between README's markers."""

import math
from dataclasses import replace

import pytest

from pycutfuse.bench import plot, report, storage
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
    Fuzz,
    HostOverhead,
    Memory,
    Run,
    SizeResult,
    SizesResult,
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
        path="fused",
        ran="linear: fused (ieee)",
        shape="16384x4096-4096",
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
    run = Run(ENVIRONMENT, {"compile": True}, list(cases), [_executor(1, 1.01, 1.03, 1.2)])
    return replace(run, host=[host], **changes)


def _size(ratio, **changes):
    times = {EAGER: ratio * 1e-3, OURS: 1e-3}
    return replace(SizeResult("100x200x300", [_check()], "fused", "", 1e-4, times), **changes)


def test_ratio_is_to_the_best_baseline_at_default_flags_and_not_to_tf32():
    case = _case()
    assert case.baseline == (COMPILE, 10.9e-3)
    assert case.speedup(OURS) == pytest.approx(4.0)
    assert "4.00x" in report.text(_run(case))


def test_rates_and_share_of_the_floor():
    figures = storage.derived(_case())[OURS]
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
    (host,) = _run().host
    assert (host.no_grad, host.grad) == pytest.approx((12e-6, 22e-6))
    row = next(line for line in report.text(_run()).splitlines() if line.startswith("Linear "))
    assert row.split() == ["Linear", OURS, "15.0", "25.0", "12.0", "22.0"]


def test_a_failed_case_is_named_and_shows_no_speed():
    failed = _case(name="broken", checks=[_check(1e-5)], timings={}, memory=None)
    run = _run(_case(), failed)
    assert not run.passed
    text = report.text(run)
    row = next(line for line in text.splitlines() if line.startswith("broken"))
    assert not any(character.isdigit() for character in row)
    assert text.splitlines()[-1] == "FAILED: broken (ieee)"


@pytest.mark.parametrize("path", ["hand-over", "fallback"])
def test_what_pytorch_ran_for_us_is_said_in_place_of_our_time(path):
    assert "PyTorch ran for us" not in report.text(_run(_case()))
    ran = f"linear: {path} (why)\n  tier: ieee"
    run = _run(_case(name="other", path=path, ran=ran, timings={}, memory=None))
    row = next(line for line in report.markdown(run).splitlines() if line.startswith("| other"))
    assert f"| {path} |" in row
    assert "x |" not in row
    text = report.text(run)
    assert f"other (ieee): not timed, PyTorch ran for us: linear: {path} (why)" in text
    assert text.splitlines()[-1].endswith("1 of them not timed, as PyTorch ran for us")


def test_every_tier_has_its_table_and_its_own_columns():
    tf32 = _case(
        tier="tf32", timings={EAGER: _timing(2.0), COMPILE: _timing(3.0), OURS: _timing(1)}
    )
    run = _run(_case(tier="bf16"), tf32, _case())
    titles = [table.title.split(":")[0] for table in report.readme_tables(run)[:3]]
    assert titles == ["ieee", "tf32", "bf16"]
    found = dict(zip(titles, report.readme_tables(run)[:3], strict=True))
    columns = {title: table.columns for title, table in found.items()}
    assert [EAGER_TF32 in columns[title] for title in titles] == [True, False, False]
    assert ["to compile" in columns[title] for title in titles] == [False, True, False]
    row = dict(zip(columns["tf32"], found["tf32"].rows[0], strict=True))
    assert (row["ratio"], row["to compile"]) == ("2.00x", "3.00x")


def test_sizes_are_summarised_and_losers_are_named():
    left = _size(1.0, path="hand-over", reason="faster there", floor_s=1e-6)
    loser = _size(0.9, shape="7x200x300", first_ratio=0.8)
    run = _run(sizes=[SizesResult("sizes", "ieee", [_size(4.0), _size(1.0), left, loser])])
    assert run.passed
    markdown = report.markdown(run)
    assert "| ieee | 4 | 4 | 3 (75%) | 0.90x | 1 | 1.38x | 1.53x | 1.53x of 3 | - |" in markdown
    assert "sizes (ieee): 7x200x300 below eager: 0.90x (at first 0.80x), fused" in markdown
    assert "sizes (ieee): 1 hand-over: faster there" in markdown


def test_each_family_of_random_sizes_has_its_table():
    linear = [SizesResult("sizes", tier, [_size(2.0)]) for tier in ("tf32", "ieee")]
    conv = SizesResult("conv_sizes", "tf32", [_size(3.0, shape="8x3x7x7-96k3s1p0")])
    found = report.readme_tables(_run(sizes=[*linear, conv]))
    titles = {
        table.title: [row[0] for row in table.rows] for table in found if "Rand" in table.title
    }
    assert titles == {
        "Random (M, N, K), log-uniform: GPU time by graph replay": ["ieee", "tf32"],
        "Random convolutions, NCHW: GPU time by graph replay": ["tf32"],
    }


def test_a_size_that_fails_fails_the_run_and_is_named():
    wrong = _size(4.0, checks=[_check(1e-5)], times={})
    broken = _size(4.0, shape="7x200x300", checks=[], times={}, failure="RuntimeError: launch")
    run = _run(sizes=[SizesResult("sizes", "bf16", [_size(2.0), wrong, broken])])
    text = report.text(run)
    assert "FAILED sizes (bf16): 100x200x300: 25.00 of the allowed error" in text
    assert "FAILED sizes (bf16): 7x200x300: RuntimeError: launch" in text
    assert text.splitlines()[-1] == "FAILED: sizes (bf16)"


def test_slower_than_max_autotune_is_named():
    times = {EAGER: 2e-3, OURS: 1e-3, COMPILE_TUNED: 0.8e-3}
    run = _run(sizes=[SizesResult("sizes", "ieee", [_size(2.0, times=times)])])
    assert "100x200x300 to compile max-autotune: 0.80x" in report.text(run)


def test_forced_policies_have_a_table_and_skipped_ones_a_line():
    times = {EAGER: _timing(11.2e-3), OURS: _timing(2.725e-3)}
    policy = _case(name="sm80.4x4-4.128x128k16", timings=times)
    text = report.markdown(_run(forced=[policy]))
    assert "| sm80.4x4-4.128x128k16 | 11.20 | 2.725 | 4.11x |" in text
    assert "sm80: skipped: no GPU" in report.text(_run(skipped={"sm80": "no GPU"}))


@pytest.mark.parametrize("name", ["wrong", "crash", "unclean"])
def test_the_fuzzers_counts_are_one_line_and_decide(name):
    counts = {"correct": 1500, "rejected": 500, "wrong": 0, "crash": 0, "unclean": 0}
    good = Fuzz("linear", (0, 1999), "NVIDIA H200", counts, handovers=3, fallbacks=2)
    run = _run(_case(), fuzz=[good])
    assert run.passed
    line = "Fuzzed linear, seeds 0 to 1999 on NVIDIA H200: 2000 configurations, 1500 correct, "
    assert report.markdown(run).count(line) == 1
    bad = replace(good, counts=counts | {name: 1})
    assert _run(_case(), fuzz=[bad]).failed == ["fuzz linear"]


def test_a_case_without_checks_has_not_passed():
    assert not _case(checks=[]).passed


def test_readme_region_round_trip(tmp_path):
    run = storage.from_json(storage.to_json(_run(_case())))
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


def test_a_section_of_a_readme_leaves_the_others(tmp_path):
    run = storage.from_json(storage.to_json(_run(_case())))
    readme = tmp_path / "README.md"
    begin, end = report.markers("convolutions")
    whole = f"{report.BEGIN}\nof linear layers\n{report.END}\n"
    readme.write_text(f"{whole}{begin}\nold figures\n{end}\n")
    assert report.update_readme(readme, run, "convolutions")
    text = readme.read_text()
    assert text.startswith(f"{whole}{begin}\n")
    assert "old figures" not in text
    assert "| linear.4x4-4.eval |" in text
    with pytest.raises(ValueError, match="results:begin absent"):
        report.update_readme(readme, run, "absent")


@pytest.mark.parametrize(
    "document",
    ["", report.BEGIN, f"{report.END}\n{report.BEGIN}", f"{report.BEGIN}{report.END}" * 2],
)
def test_a_document_without_the_region_is_refused(document):
    with pytest.raises(ValueError, match="results:"):
        report.update_region(document, "tables")


def test_every_row_has_all_columns():
    left = _case(timings={}, memory=None, clocks=None, path="fallback")
    cases = [replace(c, tier=tier) for tier in ("ieee", "tf32", "fp16") for c in (_case(), left)]
    sizes = [SizesResult("sizes", tier, [_size(2.0)]) for tier in ("bf16", "ieee")]
    run = _run(*cases, sizes=sizes, forced=[_case(), left])
    for table in (*report.tables(run), *report.readme_tables(run)):
        assert {len(row) for row in table.rows} == {len(table.columns)}, table.title


def test_bars_hold_milliseconds_of_timed_cases_only():
    partly = _case(name="train", timings={EAGER: _timing(2e-3), OURS: _timing(1e-3)})
    cases = [_case(), _case(timings={}), partly]
    groups = plot.bars(cases)
    assert [case.name for case in plot.timed(cases)] == ["linear.4x4-4.eval", "train"]
    assert groups[OURS] == pytest.approx([2.725, 1.0])
    assert groups[FROZEN][0] == pytest.approx(2.5)
    assert math.isnan(groups[FROZEN][1])


def test_the_chart_has_a_panel_for_each_tier(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "chart.png"
    plot.draw(_run(_case(), _case(tier="bf16"), _case(tier="tf32", timings={})), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(plot.PlotError, match="nothing was timed"):
        plot.draw(_run(_case(timings={})), path)
