"""Commands end without a traceback, and with their files written, whatever becomes of stdout."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pycutfuse import _console
from pycutfuse.testing.repro import Outcome, cli, runner

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-conv.json"
INFO = ("-m", "pycutfuse", "info")


def command(*words: object, stdout: object, **variables: str) -> tuple[int, str]:
    run = subprocess.run(
        [sys.executable, *map(str, words)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
        check=False,
    )
    return run.returncode, run.stderr


@pytest.fixture
def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def test_a_reader_that_goes_away_ends_a_command_quietly(closed_pipe, tmp_path):
    assert command(*INFO, stdout=closed_pipe) == (141, "")
    written = tmp_path / "run.json"
    words = ("-m", "pycutfuse", "bench", "--from-json", RESULTS, "--json", written)
    assert command(*words, stdout=closed_pipe) == (141, "")
    assert json.loads(written.read_text())["cases"]


def test_what_is_written_at_once_ends_quietly_too(closed_pipe):
    listed = ("-m", "pycutfuse", "bench", "--list")
    assert command(*listed, stdout=closed_pipe, PYTHONUNBUFFERED="1") == (141, "")


@pytest.mark.parametrize("module", ["pycutfuse", "pycutfuse.bench.mechanisms"])
def test_help_that_nobody_reads_ends_quietly(module, closed_pipe):
    words = ("-m", module, "--help")
    status, errors = command(*words, stdout=closed_pipe, PYTHONUNBUFFERED="1")
    assert errors == ""
    assert status in {0, 141}  # argparse of 3.11.2 fails, that of 3.11.7 ignores it


def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        status, errors = command(*INFO, stdout=full)
    assert status == 1
    assert errors == "pycutfuse: stdout: No space left on device\n"


def test_characters_that_stdout_cannot_write_are_replaced():
    words = ("-m", "pycutfuse", "bench", "--from-json", RESULTS)
    status, errors = command(*words, stdout=subprocess.DEVNULL, PYTHONIOENCODING="ascii")
    assert (status, errors) == (0, "")


def test_the_fuzzer_keeps_its_counts_where_nobody_reads(closed_pipe, tmp_path):
    written = tmp_path / "counts.json"
    words = ("--seed", 3, "--count", 2, "--device", "cpu", "--limit", 10, "--json", written)
    repro = ("-m", "pycutfuse.testing.repro", *words)
    status, errors = command(*repro, stdout=closed_pipe)
    assert status == 141
    assert "Traceback" not in errors
    assert json.loads(written.read_text())["seeds"] == [3, 4]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), runner.ChildFailedError("no child")])
def test_a_fuzzer_that_is_cut_off_writes_the_counts_so_far(error, tmp_path, monkeypatch, capsys):
    def cut_off(job, seeds):
        yield Outcome(seeds[0], "correct")
        yield Outcome(seeds[1], "rejected")
        raise error

    monkeypatch.setattr(cli, "run_range", cut_off)
    written = tmp_path / "counts.json"
    given = ["--seed", "5", "--count", "100", "--device", "cpu", "--json", str(written)]
    status = cli.main(given)
    found = json.loads(written.read_text())
    assert found["seeds"] == [5, 6]
    assert (found["counts"]["correct"], found["counts"]["rejected"]) == (1, 1)
    if isinstance(error, KeyboardInterrupt):
        assert status == 130
        assert "seeds 5 to 6 on cpu" in capsys.readouterr().out
    else:
        assert status == 1
        assert capsys.readouterr().err.endswith("pycutfuse: no child\n")


def test_a_fuzzer_that_is_cut_off_at_once_writes_nothing(tmp_path, monkeypatch):
    def cut_off(job, seeds):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(cli, "run_range", cut_off)
    written = tmp_path / "counts.json"
    given = ["--seed", "5", "--count", "9", "--device", "cpu", "--json", str(written)]
    assert cli.main(given) == 130
    assert not written.exists()


def test_the_fuzzer_refuses_a_folder_before_it_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "run_range", lambda *_: pytest.fail("something was run"))
    given = ["--seed", "5", "--count", "9", "--device", "cpu", "--json"]
    assert cli.main([*given, str(tmp_path)]) == 2
    assert "a folder; the name of a file is needed" in capsys.readouterr().err
    assert cli.main([*given, str(tmp_path / ("a" * 300))]) == 2
    assert "File name too long" in capsys.readouterr().err
    monkeypatch.setattr(_console.os, "access", lambda *_: False)
    assert cli.main([*given, str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err == f"pycutfuse: {tmp_path / 'x.json'}: cannot be written\n"


@pytest.mark.parametrize(
    "options",
    [
        ["--seed", str(2**58)],
        ["--seed", "-1"],
        ["--seed", "1", "--timeout", "inf"],
        ["--seed", "one"],
        ["--seed", "1", "--timeout", "soon"],
        ["--seed", str(2**58 - 2), "--count", "3"],
    ],
    ids=" ".join,
)
def test_the_fuzzer_refuses_numbers_that_it_cannot_use(options, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(options)
    assert stop.value.code == 2
    assert re.search(
        r"is not between|is not above|is no (int|float)|no seeds after", capsys.readouterr().err
    )


def test_the_fuzzers_last_seed_is_one(capsys):
    given = ["--seed", str(2**58 - 1), "--count", "1", "--device", "cpu", "--limit", "8"]
    assert cli.main(given) == 0


def test_counts_of_the_cpu_name_it(tmp_path):
    written = tmp_path / "counts.json"
    cli.main(["--seed", "5", "--device", "cpu", "--limit", "8", "--json", str(written)])
    assert json.loads(written.read_text())["device"].startswith("CPU (")
