"""CUTFUSE_PREBUILT_DIR: a library that does not fit is refused before a binding is compiled."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from .building import (
    LIBRARY,
    ROOT,
    build_wheel,
    configure,
    environment_without_nvcc,
    python_in,
    unpack,
)

ABI = int(
    re.search(r"kAbiVersion = (\d+)", (ROOT / "include/cutfuse/version.h").read_text()).group(1)
)


def library_with_abi(folder: Path, abi: int) -> Path:
    """A shared object that knows only its ABI version."""
    source = f"namespace cutfuse {{ int abi_version() noexcept {{ return {abi}; }} }}"
    command = [os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-x", "c++", "-"]
    subprocess.run(
        [*command, "-o", str(folder / "libcutfuse.so")], input=source, text=True, check=True
    )
    return folder


def test_fitting_abi_is_accepted(tmp_path: Path) -> None:
    folder = library_with_abi(tmp_path, ABI)
    result = configure(tmp_path / "build", f"-DCUTFUSE_PREBUILT_DIR={folder}")
    assert result.returncode == 0, result.stdout
    assert f"Prebuilt libcutfuse with ABI {ABI}" in result.stdout
    assert "CUDA compiler" not in result.stdout  # neither nvcc nor CUTLASS is asked for
    assert "CUTLASS" not in result.stdout


def test_other_abi_is_refused(tmp_path: Path) -> None:
    folder = library_with_abi(tmp_path, ABI + 1)
    result = configure(tmp_path / "build", f"-DCUTFUSE_PREBUILT_DIR={folder}")
    assert result.returncode != 0
    assert f"has ABI {ABI + 1}, but this source tree needs ABI {ABI}" in result.stdout


def test_folder_without_library_is_refused(tmp_path: Path) -> None:
    result = configure(tmp_path / "build", f"-DCUTFUSE_PREBUILT_DIR={tmp_path}")
    assert result.returncode != 0
    assert "it holds no libcutfuse.so" in result.stdout


@pytest.mark.parametrize("bytes_kept", [0, 3000])
def test_truncated_library_is_refused(tmp_path: Path, bytes_kept: int) -> None:
    library = library_with_abi(tmp_path, ABI) / "libcutfuse.so"
    library.write_bytes(library.read_bytes()[:bytes_kept])
    result = configure(tmp_path / "build", f"-DCUTFUSE_PREBUILT_DIR={tmp_path}")
    assert result.returncode != 0
    assert "is not a usable libcutfuse" in result.stdout


@pytest.mark.skipif(not LIBRARY.exists(), reason="no libcutfuse.so: built only with CUDA's nvcc")
def test_wheel_with_prebuilt_library_imports(tmp_path: Path) -> None:
    environment = environment_without_nvcc(tmp_path / "bin")
    define = f"CUTFUSE_PREBUILT_DIR={LIBRARY.parent}"
    names = unpack(build_wheel(tmp_path / "wheel", environment, define), tmp_path / "site")
    assert "pycutfuse/libcutfuse.so" in names
    assert len([name for name in names if name.startswith("pycutfuse/_C.")]) == 2  # .so and .pyi
    code = "from pycutfuse import _C; print(_C.ABI_VERSION, _C.abi_version(), _C.__file__)"
    result = python_in(tmp_path / "site", code)
    assert result.stdout.startswith(f"{ABI} {ABI} {tmp_path}"), result.stderr
