"""Results survive JSON, results of older formats are still read, and anything else is refused."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from pycutfuse.bench import report, storage
from pycutfuse.bench.accuracy import Check, Errors
from pycutfuse.bench.results import (
    COMPILE,
    EAGER,
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

COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))


def _timing(seconds):
    return Timing(Summary(seconds, seconds, seconds, 10), "sustained")


def _run():
    check = Check("rand: output", Errors(1e-7, 1e-7), Errors(4e-7, 4e-7), 2.0**-22)
    case = CaseResult(
        name="linear.4x4-4",
        chain="Linear",
        shape="4x4-4-2",
        training=False,
        checks=[check],
        tier="tf32",
        path="fused",
        ran="linear: fused (tf32)",
        timings={EAGER: _timing(4e-3), COMPILE: _timing(3e-3), OURS: _timing(1e-3)},
        memory=Memory(1, 2, 3, 4),
        clocks={"sm_mhz": 1400.0},
        fp32_precision={"matmul": "tf32", "cudnn.conv": "tf32"},
    )
    odd = replace(check, ours=Errors(math.inf, math.nan))
    broken = replace(case, checks=[replace(odd, ours=Errors(math.inf, 1.0))], timings={})
    sizes = [
        SizeResult("1x2x3", [check], "fused", "", 1e-5, {EAGER: 2e-5, OURS: 1e-5}, "graph replay"),
        SizeResult("4x5x6", [], failure="RuntimeError"),
    ]
    return Run(
        {
            "gpu": "H200",
            "driver": "580",
            "cuda": "13",
            "torch": "2",
            "python": "3",
            "pycutfuse": "0",
        },
        {"settings": {"slice_s": 0.2, "rounds": 4}},
        [case, broken],
        [ExecutorResult("executor", [replace(case, name="executor.1")])],
        [SizesResult("sizes", "bf16", sizes, {"cudnn.conv": "ieee"})],
        [case],
        [Fuzz("linear", (0, 9), "H200", {"correct": 10})],
        {"sm80": "why"},
        [
            HostOverhead(1e-6, 2e-6, 3e-6, 4e-6, 5e-6, "sm90"),
            HostOverhead(1e-6, 2e-6, 3e-6, 4e-6, 5e-6, "sm90", "LinearScaleBatchNorm1d"),
        ],
    )


def test_json_round_trip_keeps_everything():
    run = _run()
    text = storage.to_json(run)
    assert storage.from_json(text) == run
    data = json.loads(text)
    assert data["cases"][0]["derived"][OURS]["speedup"] == pytest.approx(3.0)
    assert data["sizes"][0]["derived"]["worst"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 99}', '{"format": 1}', '{"format": 3}', "nonsense"]
)
def test_other_json_is_refused(text):
    with pytest.raises(ValueError, match=r"format|not a result"):
        storage.from_json(text)


def test_a_newer_format_says_what_to_do():
    with pytest.raises(ValueError, match=r"format 99; this version reads 1 to 4: measure again"):
        storage.from_json('{"format": 99}')


def test_an_error_names_the_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=str(path)):
        storage.read(path)


def _format_3(run):
    data = json.loads(storage.to_json(run))
    programs = [program for executor in data["executor"] for program in executor["programs"]]
    for case in (*data["cases"], *programs, *data["forced"]):
        case["shape"] = [int(size) for size in case["shape"].replace("-", "x").split("x")]
        del case["fp32_precision"], case["memory"]["slack"]
    for sizes in data["sizes"]:
        del sizes["fp32_precision"]
        for entry in sizes["entries"]:
            entry["m"], entry["n"], entry["k"] = map(int, entry.pop("shape").split("x"))
    return {**data, "format": 3}


def _without_flags(run):
    """What an older format keeps of a run."""
    without = [replace(case, fp32_precision={}) for case in (*run.cases, *run.forced)]
    cases, forced = without[: len(run.cases)], without[len(run.cases) :]
    executor = [
        replace(e, programs=[replace(p, fp32_precision={}) for p in e.programs])
        for e in run.executor
    ]
    sizes = [replace(sizes, fp32_precision={}) for sizes in run.sizes]
    return replace(run, cases=cases, forced=forced, executor=executor, sizes=sizes)


def _format_2(run):
    data = _format_3(run)
    return {**data, "format": 2, "host": data["host"][0] if data["host"] else None}


def _format_1(run):
    data = _format_2(run)
    for name in ("sizes", "forced", "fuzz", "skipped"):
        del data[name]
    for case in (*data["cases"], *(p for e in data["executor"] for p in e["programs"])):
        del case["tier"]
        case["fused"] = case.pop("path") == "fused"
    return json.dumps({**data, "format": 1, "tier": "ieee"})


def test_the_first_format_is_read_with_its_one_tier():
    run = _without_flags(_run())
    left = replace(run.cases[0], path="hand-over", ran="linear: hand-over (faster)")
    run = replace(run, cases=[*run.cases, left])
    found = storage.from_json(_format_1(run))
    assert found.cases == [replace(case, tier="ieee") for case in run.cases]
    assert (found.sizes, found.forced, found.fuzz, found.skipped) == ([], [], [], {})


def test_the_second_format_is_read_with_its_one_host_time():
    run = _without_flags(_run())
    assert storage.from_json(json.dumps(_format_3(run))) == run
    assert storage.from_json(json.dumps(_format_2(run))) == replace(run, host=run.host[:1])
    none = replace(run, host=[])
    assert storage.from_json(json.dumps(_format_2(none))) == none


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_committed_results_are_rendered(path):
    run = storage.read(path)
    assert run.passed
    names = [case.name for case in run.cases if case.timings]  # a table for each tier
    assert names or run.sizes
    for name in set(names):
        assert report.markdown(run).count(f"| {name} |") >= names.count(name)


def test_who_is_cut_off_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    storage.write(path, _run())
    old = path.read_text()

    def cut_off(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(storage.os, "replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        storage.write(path, Run({}, {}))
    assert path.read_text() == old


def test_a_link_stays_one_and_its_file_is_written(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "run.json", tmp_path / "link.json"
    link.symlink_to(target)
    for _ in range(2):
        storage.write(link, _run())
        assert link.is_symlink()
        assert storage.read(target) == _run()


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    storage.write(pipe, Run({}, {}))
    assert pipe.is_fifo()
    assert os.read(reader, 2**16).decode() == storage.to_json(Run({}, {}))
    os.close(reader)


def _damaged(change):
    data = json.loads(storage.to_json(_run()))
    change(data)
    return json.dumps(data)


DAMAGE = {
    "environment {}": lambda d: d.update(environment={}),
    "environment null": lambda d: d.update(environment=None),
    "no driver": lambda d: d["environment"].pop("driver"),
    "text median": lambda d: d["cases"][0]["timings"][OURS]["seconds"].update(median="fast"),
    "median 0": lambda d: d["cases"][0]["timings"][OURS]["seconds"].update(median=0),
    "median true": lambda d: d["cases"][0]["timings"][OURS]["seconds"].update(median=True),
    "foreign tier": lambda d: d["cases"][0].update(tier="fp8"),
    "foreign tier of sizes": lambda d: d["sizes"][0].update(tier="fp8"),
    "time 0": lambda d: d["sizes"][0]["entries"][0]["times"].update({OURS: 0}),
    "no programs": lambda d: d["executor"][0].update(programs=[]),
    "text count": lambda d: d["fuzz"][0]["counts"].update(correct="ten"),
    "name null": lambda d: d["cases"][0].update(name=None),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_refused_by_name(name, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(_damaged(DAMAGE[name]))
    with pytest.raises(ValueError, match=str(path)):
        storage.read(path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000], ids=["not UTF-8", "too deep"])
def test_what_is_no_json_at_all_is_refused_by_name(content, tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=str(path)):
        storage.read(path)
