"""Both commands do what their options say, and answer nonsense in one line with exit code 2."""

import argparse
import json
import re
import sys
from dataclasses import replace

import pytest
import torch

from pycutfuse.bench import cli, report, storage

GOOD = """
import torch
from torch import nn

class Model(nn.Linear):
    pass

class ModelNew(nn.Linear):
    {body}

def get_inputs():
    return [torch.rand(8, 4)]

def get_init_inputs():
    return [4, 3]
"""


def run(*arguments):
    parser = argparse.ArgumentParser(prog="pycutfuse")
    cli.add_arguments(parser.add_subparsers(required=True))
    parsed = parser.parse_args([str(argument) for argument in arguments])
    return parsed.run(parsed)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def _file(tmp_path, text):
    path = tmp_path / "problem.py"
    path.write_text(text)
    return path


def test_verify_gives_0_for_a_faithful_model_and_1_for_a_wrong_one(tmp_path, no_gpu, capsys):
    assert run("verify", _file(tmp_path, GOOD.replace("{body}", "pass"))) == 0
    wrong = "def forward(self, x):\n        return super().forward(x) + 1e-5"
    assert run("verify", _file(tmp_path, GOOD.replace("{body}", wrong))) == 1
    assert "FAILED" in capsys.readouterr().out


NONSENSE = {
    "syntax error": ("def get_inputs(:\n", "problem.py:1: syntax error"),
    "raises": ("x = 1\n1 / 0\n", "problem.py:2: ZeroDivisionError"),
    "exits": ("import sys\nsys.exit(0)\n", "problem.py:2: SystemExit"),
    "null byte": ("x = 1\0\n", "problem.py"),
    "no such coding": ("# coding: odd\n", "problem.py: syntax error: unknown encoding: odd"),
    "no ModelNew": (GOOD.replace("ModelNew", "Other"), "defines no ModelNew"),
    "no Model": (GOOD.replace("class Model(", "class Other("), "defines no Model;"),
    "no get_inputs": (GOOD.replace("get_inputs", "inputs"), "no function get_inputs()"),
    "not a module": ("Model = ModelNew = int\n", "Model is not a subclass"),
    "not a list": (GOOD.replace("return [4, 3]", "return 4"), "get_init_inputs() returned int"),
    "wrong init": (GOOD.replace("[4, 3]", "[4, 3, 4, 5, 6, 7, 8]"), "Model raised TypeError"),
    "get_inputs exits": (
        GOOD.replace("return [torch.rand(8, 4)]", "raise SystemExit(0)"),
        "get_inputs() raised SystemExit",
    ),
    "Model exits": (
        GOOD.replace("pass", "def forward(self, x):\n        raise SystemExit(0)", 1),
        "Model failed in train, get_inputs(): SystemExit",
    ),
    "sizes not known yet": (
        GOOD.replace("nn.Linear", "nn.LazyLinear").replace("[4, 3]", "[3]"),
        "no state_dicts to compare: RuntimeError",
    ),
    "stays where it is": (
        GOOD.replace("pass", "def to(self, *_):\n        raise RuntimeError('too large')", 1),
        "cannot be moved to cpu: RuntimeError: too large",
    ),
    "wrong input": (GOOD.replace("(8, 4)", "(8, 5)"), "Model failed in train, get_inputs()"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_verify_answers_a_nonsense_file_in_one_line(tmp_path, no_gpu, capsys, name):
    text, expected = NONSENSE[name]
    assert run("verify", _file(tmp_path, text.replace("{body}", "pass"))) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line[0] != " "]
    assert len(lines) == 1
    assert lines[0].startswith("pycutfuse: ")
    assert expected in lines[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("absent.py", "no such file"),
        (".", "not a Python file"),
        ("a" * 300 + ".py", "File name too long"),
    ],
)
def test_verify_answers_a_path_that_is_no_file(tmp_path, capsys, name, expected):
    assert run("verify", tmp_path / name) == 2
    assert expected in capsys.readouterr().err


def test_verify_names_no_line_where_none_was_run(tmp_path, capsys):
    assert run("verify", _file(tmp_path, "\0")) == 2
    error = capsys.readouterr().err
    assert "null bytes" in error
    assert ".py:0" not in error


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "meta"])
def test_verify_answers_an_impossible_device(tmp_path, capsys, device):
    path = _file(tmp_path, GOOD.replace("{body}", "pass"))
    assert run("verify", path, "--device", device) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("info", "extra"),
        ("bench", "--tier", "fp8"),
        ("bench", "--tier"),
        ("bench", "nonsense"),
        ("bench", "--cases", "x"),
        ("verify",),
        ("verify", "x.py", "--batch", "0"),
        ("verify", "x.py", "--batch", "many"),
        ("verify", "x.py", "--seed", "99999999999999999999"),
        ("verify", "x.py", "--seed", "-1"),
    ],
)
def test_impossible_options_end_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    assert stop.value.code == 2
    assert " _" not in capsys.readouterr().err  # no function of ours


@pytest.mark.parametrize("command", ["bench", "verify"])
def test_help_names_the_options(command, capsys):
    with pytest.raises(SystemExit) as stop:
        run(command, "--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert ("--case" in shown and "--plot" in shown) if command == "bench" else "FILE" in shown


def test_list_names_the_chosen_cases_and_runs_nothing(capsys):
    assert run("bench", "--list", "--case", "linear_gelu.4096*") == 0
    assert capsys.readouterr().out == "linear_gelu.4096x4096-4096\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--case", "conv9d"], "--case conv9d: no such case"),
        (["--tier", "bf16", "--case", "sm80"], "--case sm80 is measured at --tier ieee only"),
        (["--tier", "tf32", "--case", "executor*"], "is measured at --tier ieee only"),
        (["--json", "a.json", "--merge", "b.json"], "give one of them"),
        (["--merge", "absent/folder/x.json"], "does not exist"),
        (["--merge", "."], "a folder"),
        (["--fuzz", "absent.json"], "absent.json"),
        (["--fuzz", "one.json", "--fuzz", "./one.json"], "--fuzz names a file twice"),
        (["--list", "--json", "x.json"], "--list runs nothing: --json means nothing there"),
        (["--list", "--section", "x"], "--section means nothing there"),
        (["--list", "--tier", "bf16"], "--tier means nothing there"),
        (["--list", "--quick"], "--quick means nothing there"),
        (["--list", "--no-compile"], "--no-compile means nothing there"),
        (["--from-json", "x.json", "--tier", "ieee"], "--tier means nothing there"),
        (["--from-json", "x.json", "--quick"], "--quick means nothing there"),
        (["--from-json", "x.json", "--case", "sm80"], "--case means nothing there"),
        (["--plot", "x.jpeg"], "a name ending in .png is needed"),
        (["--from-json", "absent.json"], "absent.json"),
        (["--update-readme", "absent.md"], "absent.md"),
        (["--section", "convolutions"], "give --update-readme FILE too"),
        (["--json", "absent/folder/x.json"], "does not exist"),
    ],
)
def test_bench_answers_nonsense_before_it_runs(arguments, expected, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_measure", lambda *_: pytest.fail("something was run"))
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    assert run("bench", *arguments) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("option", ["--json", "--merge", "--plot", "--update-readme"])
def test_a_file_that_cannot_be_written_is_found_before_the_run(
    option, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(cli, "_measure", lambda *_: pytest.fail("something was run"))
    monkeypatch.setattr("pycutfuse._console.os.access", lambda *_: False)
    if option == "--plot":
        pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    if option == "--update-readme":
        path.write_text(f"{report.BEGIN}\n{report.END}\n")
    assert run("bench", option, path) == 2
    assert capsys.readouterr().err == f"pycutfuse: {path}: cannot be written\n"


def test_plot_without_matplotlib_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(cli, "_measure", lambda *_: pytest.fail("something was run"))
    assert run("bench", "--plot", "x.png") == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_run_that_is_cut_off_leaves_what_it_has_found(tmp_path, no_gpu, monkeypatch):
    from pycutfuse.bench import runner

    run_case = runner.run_case

    def cut_off(case, options, device):
        if "5000" in case.name:
            raise KeyboardInterrupt
        return run_case(case, options, device)

    monkeypatch.setattr(runner, "run_case", cut_off)
    written = tmp_path / "run.json"
    with pytest.raises(KeyboardInterrupt):
        run("bench", "--case", "linear_gelu.*", "--json", written)
    assert len(storage.read(written).cases) == 3


def test_without_a_gpu_cases_are_verified_at_reduced_sizes_and_said_so(tmp_path, no_gpu, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"{report.BEGIN}\n{report.END}\n")
    written = tmp_path / "run.json"
    chosen = ["--case", "linear_gelu.5000*", "--case", "*.1024x8192-8192.train"]
    code = run("bench", *chosen, "--json", written, "--update-readme", readme)
    captured = capsys.readouterr()
    assert code == 0
    assert "no GPU" in captured.err
    assert "x eager" not in captured.err
    assert "reference path ran at reduced sizes and no speed is reported" in captured.out
    result = storage.read(written)
    assert [case.name for case in result.cases] == [
        "linear_scale_batch_norm.1024x8192-8192.train",
        "linear_gelu.5000x3000-1000",
    ]
    assert result.cases[1].shape == "156x93-31"
    assert all(case.passed and not case.timings for case in result.cases)
    assert json.loads(written.read_text())["environment"]["gpu"] is None
    assert "156x93-31" in readme.read_text()
    assert run("bench", "--from-json", written, "--update-readme", readme) == 0
    assert "up to date" in capsys.readouterr().out


def test_a_run_that_verifies_nothing_says_so_and_gives_1(no_gpu, capsys):
    assert run("bench", "--case", "sm80") == 1
    out = capsys.readouterr().out
    assert "sm80: skipped: no GPU" in out
    assert out.splitlines()[-1] == "NOTHING VERIFIED"


def test_one_broken_case_does_not_cost_the_others_and_gives_1(no_gpu, capsys, monkeypatch):
    from pycutfuse.bench import runner

    run_case = runner.run_case

    def broken(case, options, device):
        if "5000" in case.name:
            raise RuntimeError("out of memory")
        return run_case(case, options, device)

    monkeypatch.setattr(runner, "run_case", broken)
    assert run("bench", "--case", "linear_gelu.*") == 1
    out = capsys.readouterr().out
    assert "out of memory" in out
    assert out.splitlines()[-1] == "FAILED: linear_gelu.5000x3000-1000 (ieee)"


def test_all_tiers_sizes_and_forced_policies_without_a_gpu(tmp_path, no_gpu, capsys, monkeypatch):
    from pycutfuse.bench.case import SizesCase

    few = lambda case: replace(case, count=3, largest=32)  # noqa: E731
    monkeypatch.setattr(SizesCase, "reduced", few)
    written = tmp_path / "run.json"
    chosen = ["--case", "linear_gelu.2048*", "--case", "sizes", "--case", "sm80"]
    assert run("bench", "--tier", "all", *chosen, "--json", written) == 0
    found = storage.read(written)
    assert [case.tier for case in found.cases] == ["ieee", "tf32", "fp16", "bf16"]
    assert [len(sizes.entries) for sizes in found.sizes] == [3] * 4
    assert found.skipped == {"sm80": "no GPU"}
    out = capsys.readouterr().out
    assert "PASSED: 16 cases verified on the CPU" in out
    assert not re.search(r"[0-9]x\b", out)  # no ratio: nothing was timed
