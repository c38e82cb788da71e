"""Kernels whose instructions a host can follow are run on it: see CMakeLists.txt."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..packaging.building import NVCC

ROOT = Path(__file__).resolve().parents[2]
KERNELS = "tests/emulated/kernels.py"
DIRECT = "tests/emulated/direct.py"
LINEAR = "tests/emulated/linear.py"
CONTRACT = "tests/emulated/contract.py"
# As on a GPU, but for large ones and CUDA graphs:
PATCHES = "tests/numerics/test_conv_patches.py"
PLANES = "tests/numerics/test_conv_planes.py"
RINGS = "tests/numerics/test_conv_rings.py"
OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "tests.emulated.plugin")
GROUPS = {
    KERNELS: ("of_whole_numbers", "convolutions and not whole", "finite or norm", "rest"),
    DIRECT: ("whole_numbers", "finite or padding", "rest"),
    LINEAR: ("rest",),
    CONTRACT: ("rest",),
    PATCHES: ("not many_tiles",),
    RINGS: ("rest",),
    PLANES: (
        "(c64x256 or c72 or c136x64 or largest or channels_at_ieee or magnitudes) and not captured",
    ),
}


@pytest.fixture(scope="module")
def library() -> Path:
    """That of the newest build here, up to date."""
    folders = [*ROOT.glob("build/*/tests/emulated")]
    assert folders, "no build here made tests; `make build` does"
    folder = max(folders, key=lambda path: path.stat().st_mtime)
    build = folder.parents[1]
    command = re.search(
        r"^CMAKE_COMMAND:INTERNAL=(.*)$", (build / "CMakeCache.txt").read_text(), re.M
    )
    assert command is not None
    run([command[1], "--build", str(build), "--target", "cutfuse_emulated", "--parallel"])
    return folder / "libcutfuse.so"


def run(command: list[str], **environment: str) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


@pytest.mark.skipif(NVCC is None, reason="built where nvcc is")
@pytest.mark.parametrize(
    ("kernels", "group"), [(file, group) for file in GROUPS for group in GROUPS[file]]
)
def test_emulated_kernels(kernels: str, group: str, library: Path) -> None:
    others = " or ".join(f"({one})" for one in GROUPS[kernels][:-1])
    chosen = (f"not ({others})" if others else "") if group == "rest" else group
    printed = run(
        [sys.executable, "-m", "pytest", *OPTIONS, "-k", chosen, kernels],
        CUTFUSE_EMULATED=str(library),
        PYTEST_ADDOPTS="",
    )
    assert " passed" in printed
    assert re.search(r"[1-9]\d* skipped", printed) is None
