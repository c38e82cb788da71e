"""`bench` adds to result files, and takes the fuzzer's counts in."""

import json

import pytest
import torch

from pycutfuse.bench import cli, report, storage

from .test_cli import run


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_merging_adds_a_tier_and_refuses_other_settings(tmp_path, no_gpu, capsys, monkeypatch):
    written = tmp_path / "run.json"
    chosen = ["--case", "linear_gelu.2048*", "--merge", written]
    assert run("bench", *chosen) == 0
    assert run("bench", *chosen, "--tier", "bf16") == 0
    assert [case.tier for case in storage.read(written).cases] == ["ieee", "bf16"]
    old = written.read_text()
    capsys.readouterr()
    monkeypatch.setattr(cli, "_measure", lambda *_: pytest.fail("something was run"))
    assert run("bench", *chosen, "--quick") == 2
    captured = capsys.readouterr()
    assert "slices are" in captured.err
    assert captured.err.count("\n") == 1
    assert written.read_text() == old


def test_files_of_two_runs_are_merged_without_measuring(tmp_path, no_gpu, monkeypatch):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    case = ["--case", "linear_gelu.2048*"]
    assert run("bench", *case, "--json", one) == 0
    assert run("bench", *case, "--tier", "fp16", "--json", two) == 0
    monkeypatch.setattr(cli, "_measure", lambda *_: pytest.fail("something was run"))
    assert run("bench", "--from-json", two, "--merge", one) == 0
    assert [found.tier for found in storage.read(one).cases] == ["ieee", "fp16"]


def test_a_merge_with_no_result_file_is_refused_before_it_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_measure", lambda *_: pytest.fail("something was run"))
    path = tmp_path / "other.json"
    path.write_text("[]")
    assert run("bench", "--merge", path) == 2
    assert "not a result of pycutfuse bench" in capsys.readouterr().err
    assert path.read_text() == "[]"


def test_the_fuzzers_counts_reach_readme(tmp_path, no_gpu):
    fuzz, readme = tmp_path / "fuzz.json", tmp_path / "README.md"
    readme.write_text(f"{report.BEGIN}\n{report.END}\n")
    counts = {"correct": 8, "rejected": 2, "wrong": 0, "crash": 0, "unclean": 0}
    data = {"job": {"family": "linear"}, "seeds": [0, 9], "device": "", "torch": "2"}
    fuzz.write_text(json.dumps({**data, "counts": counts, "handovers": 0, "fallbacks": 1}))
    given = ["--case", "linear_gelu.2048*", "--fuzz", fuzz, "--update-readme", readme]
    assert run("bench", *given) == 0
    assert readme.read_text().count("10 configurations, 8 correct, 2 rejected, 0 wrong") == 1
