"""Results of several runs go into one file only if they were made on the same thing."""

import json

import pytest

from pycutfuse.bench import merging
from pycutfuse.bench.results import CaseResult, ExecutorResult, Fuzz, HostOverhead, Run, SizesResult

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.11.0",
    "python": "3.12.3",
    "pycutfuse": "0.1.0",
    "library": {"build": "nvcc 13.0", "sha256": "abc"},
    "fp32_precision": {"matmul": "none"},
    "commit": "one",
}
SETTINGS = {"compile": True, "settings": {"slice_s": 0.2, "rounds": 4}}
HOST = HostOverhead(1e-6, 2e-6, 3e-6, 4e-6, 5e-6, "sm90")


def _case(name, tier="ieee", chain="old"):
    return CaseResult(name, chain, "1x2-3", False, [], tier)


def _run(*cases, **parts):
    return Run(ENVIRONMENT, SETTINGS, list(cases), **parts)


def test_another_tier_is_added_and_the_same_one_is_replaced_in_place():
    old = _run(_case("a"), _case("b"))
    new = _run(_case("b", "bf16"), _case("a", chain="new"))
    found = merging.merge(old, new).cases
    assert [(case.name, case.tier, case.chain) for case in found] == [
        ("a", "ieee", "new"),
        ("b", "ieee", "old"),
        ("b", "bf16", "old"),
    ]


def test_every_kind_of_result_is_kept():
    sizes = {tier: SizesResult("sizes", tier, []) for tier in ("ieee", "bf16")}
    fuzz = Fuzz("linear", (0, 9), "NVIDIA H200", {"correct": 10})
    old = _run(sizes=[sizes["ieee"]], skipped={"sm80": "not compiled"}, host=[HOST])
    new = _run(
        executor=[ExecutorResult("e", [])],
        sizes=[sizes["bf16"]],
        forced=[_case("sm80.1x2-3.64x64k16")],
        fuzz=[fuzz, fuzz],
    )
    found = merging.merge(old, new)
    assert found.sizes == [sizes["ieee"], sizes["bf16"]]
    assert (found.executor, found.forced) == (new.executor, new.forced)
    assert found.fuzz == [fuzz]
    assert found.skipped == {}
    assert found.host == [HOST]


def test_merging_a_run_with_itself_changes_nothing():
    run = _run(_case("a"), sizes=[SizesResult("sizes", "ieee", [])], host=[HOST])
    assert merging.merge(run, run) == run


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gpu", "NVIDIA H100"),
        ("driver", "590"),
        ("torch", "2.13.0"),
        ("library", {"build": "nvcc 13.0", "sha256": "def"}),
        ("library", None),
        ("fp32_precision", {"matmul": "tf32"}),
    ],
)
def test_another_environment_is_refused_and_named(name, value):
    new = Run({**ENVIRONMENT, name: value}, SETTINGS)
    with pytest.raises(ValueError, match=rf"{name} is .*--json starts a new one"):
        merging.merge(_run(), new)


def test_another_length_of_timing_is_refused():
    quick = {**SETTINGS, "settings": {"slice_s": 0.05, "rounds": 2}}
    with pytest.raises(ValueError, match="slices are"):
        merging.merge(_run(), Run(ENVIRONMENT, quick))


def test_commits_of_both_are_kept():
    other = Run({**ENVIRONMENT, "commit": "two"}, SETTINGS)
    once = merging.merge(_run(), other)
    assert once.environment["commit"] == "one, two"
    assert merging.merge(once, other).environment["commit"] == "one, two"
    unknown = Run({**ENVIRONMENT, "commit": None}, SETTINGS)
    assert merging.merge(unknown, other).environment["commit"] == "two"


def _fuzz_file(tmp_path, **changes):
    data = {
        "job": {"family": "linear", "device": "cuda", "limit": 30, "timeout": 120.0},
        "seeds": [0, 1999],
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "counts": {"correct": 1500, "rejected": 500, "wrong": 0, "crash": 0, "unclean": 0},
        "fallbacks": 2,
        "handovers": 3,
        "mechanisms": {"an implicit GEMM": 7},
    }
    path = tmp_path / "fuzz.json"
    path.write_text(json.dumps({**data, **changes}))
    return path


def test_the_fuzzers_counts_are_read(tmp_path):
    fuzz = merging.read_fuzz(_fuzz_file(tmp_path), ENVIRONMENT)
    assert (fuzz.family, fuzz.seeds, fuzz.total, fuzz.passed) == ("linear", (0, 1999), 2000, True)
    assert (fuzz.handovers, fuzz.fallbacks) == (3, 2)
    assert fuzz.mechanisms == {"an implicit GEMM": 7}


@pytest.mark.parametrize("change", [{"device": "NVIDIA H100"}, {"torch": "2.13.0"}])
def test_counts_of_another_device_or_torch_are_refused(tmp_path, change):
    with pytest.raises(ValueError, match="made on"):
        merging.read_fuzz(_fuzz_file(tmp_path, **change), ENVIRONMENT)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"job": {}}', '{"job": 3, "seeds": []}'])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"no counts of python -m pycutfuse\.testing\.repro"):
        merging.read_fuzz(path, ENVIRONMENT)


def test_what_the_fuzzer_writes_is_what_is_read(tmp_path):
    from pycutfuse.testing.repro.cli import main

    path = tmp_path / "fuzz.json"
    given = ["--seed", "0", "--count", "3", "--device", "cpu", "--json", str(path)]
    assert main(given) == 0
    assert merging.read_fuzz(path, {"gpu": None}).total == 3
