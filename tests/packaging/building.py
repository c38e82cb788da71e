"""Running CMake and pip on this tree the way a user does, in a given environment."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "pycutfuse" / "libcutfuse.so"
NVCC = shutil.which("nvcc") or (
    "/usr/local/cuda/bin/nvcc" if Path("/usr/local/cuda/bin/nvcc").exists() else None
)


def environment_without_nvcc(folder: Path) -> dict[str, str]:
    """An environment whose PATH has what a build without kernels needs, and no nvcc."""
    folder.mkdir()
    tools = {"cmake", "ninja", "g++", "c++", "cc", "gcc", "as", "ld", "ar", "sh", "uname"}
    # Those that this Python was built with, which the build looks for.
    for name in ("CC", "CXX"):
        tools.add(Path((sysconfig.get_config_var(name) or "c++").split()[0]).name)
    for tool in tools:
        found = shutil.which(tool)
        if found:
            (folder / tool).symlink_to(found)
    environment = {k: v for k, v in os.environ.items() if k not in ("CUDACXX", "CUDA_PATH")}
    return environment | {"PATH": str(folder), "CUDA_HOME": str(folder / "none")}


def configure(build: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`cmake` on this tree into `build`; never raises, the caller reads the text."""
    command = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"]
    command += [f"-DPython_EXECUTABLE={sys.executable}", *options]
    return run(command, {**os.environ, **environment})


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run with stdout and stderr in one text whose white space is single spaces: CMake wraps."""
    result = subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    result.stdout = " ".join(result.stdout.split())
    return result


def build_folder(name: str) -> Path:
    """Where this Python keeps a build tree, so that a second run compiles nothing."""
    return ROOT / "build" / f"{name}-{sys.implementation.cache_tag}"


def build_wheel(
    folder: Path, environment: dict[str, str], *defines: str, build: Path | None = None
) -> Path:
    """`pip wheel .` with the build requirements of this environment; the wheel's path."""
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--wheel-dir"]
    command += [str(folder), "--no-build-isolation"]
    command += [f"-Ccmake.define.{define}" for define in defines]
    if build is not None:
        command += [f"-Cbuild-dir={build}"]
    result = run(command, environment)
    assert result.returncode == 0, result.stdout
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> set[str]:
    """Unpack as pip would, without its environment; returns the names."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        return set(archive.namelist())


def python_in(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` where `folder` is the only place that has a pycutfuse."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
