"""The command behind the Makefile says what it takes, and drops nothing that it is given."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "dev.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_is_an_answer() -> None:
    help_, nonsense = run("--help"), run("deploy")
    assert (help_.returncode, nonsense.returncode) == (0, 1)
    assert help_.stdout == nonsense.stderr
    assert help_.stdout.startswith("usage: ")


def test_an_interrupt_ends_it_without_a_traceback() -> None:
    code = f"""
import runpy, subprocess, sys
def interrupted(*_, **__):
    raise KeyboardInterrupt
subprocess.run = interrupted
sys.argv = ["dev.py", "lint"]
runpy.run_path({str(TOOL)!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("command", ["build", "lint", "format"])
def test_arguments_that_would_be_dropped_are_refused(command: str) -> None:
    done = run(command, "-k", "one")
    assert done.returncode == 1
    assert done.stderr == f"{command} takes no arguments, but got -k one\n"
    assert done.stdout == ""


def test_an_old_torch_is_told_with_a_remedy(tmp_path: Path) -> None:
    check_torch = runpy.run_path(str(TOOL))["check_torch"]
    python = tmp_path / "python"

    def check(version: str) -> None:
        python.write_text(f"#!/bin/sh\necho {version}\n")
        python.chmod(0o755)
        check_torch(python)

    check("2.10.0")
    check("3.0.0a0+git1234")
    with pytest.raises(SystemExit, match=r"needs torch>=.*has torch 2\.9\.1\+cu128; upgrade it"):
        check("2.9.1+cu128")
