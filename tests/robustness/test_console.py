"""Commands end without a traceback, and with their files written, whatever becomes of stdout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        status, errors = command(*INFO, stdout=full)
    assert status == 1
    assert errors == "pycutfuse: stdout: No space left on device\n"


def test_characters_that_stdout_cannot_write_are_replaced():
    words = ("-m", "pycutfuse", "bench", "--from-json", RESULTS)
    status, errors = command(*words, stdout=subprocess.DEVNULL, PYTHONIOENCODING="ascii")
    assert (status, errors) == (0, "")
