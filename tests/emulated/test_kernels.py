"""Kernels whose instructions a host can follow are run on it: see CMakeLists.txt."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..packaging.building import NVCC

ROOT = Path(__file__).resolve().parents[2]
KERNELS = "tests/emulated/kernels.py"
DIRECT = "tests/emulated/direct.py"
OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "tests.emulated.plugin")
GROUPS = {
    KERNELS: ("of_whole_numbers", "convolutions and not whole", "finite or norm", "rest"),
    DIRECT: ("whole_numbers", "finite or padding", "rest"),
}


def library() -> Path | None:
    """The newest one that a build here made."""
    found = [*ROOT.glob("build/*/tests/emulated/libcutfuse.so")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


@pytest.mark.skipif(NVCC is None, reason="built where nvcc is")
@pytest.mark.parametrize(
    ("kernels", "group"), [(file, group) for file in GROUPS for group in GROUPS[file]]
)
def test_emulated_kernels(kernels: str, group: str) -> None:
    others = " or ".join(f"({one})" for one in GROUPS[kernels][:-1])
    chosen = f"not ({others})" if group == "rest" else group
    path = library()
    assert path is not None, "no build made tests/emulated; `make build` does"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, "-k", chosen, kernels],
        cwd=ROOT,
        env={**os.environ, "CUTFUSE_EMULATED": str(path), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
