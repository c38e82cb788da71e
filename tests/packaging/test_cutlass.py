"""CUTLASS comes by hash, or from a folder that the user names; anything else stops with words.

The compiler named here does not exist: CUTLASS is looked for before any compiler is tried, so these
tests need neither nvcc nor a network.
"""

import zipfile
from pathlib import Path

from .building import configure

NO_COMPILER = "-DCMAKE_CUDA_COMPILER=/nonexistent/nvcc"
WHEEL = "nvidia_cutlass-4.2.0.0-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: nvidia-cutlass\nVersion: 4.2.0.0\n"
OVERRIDE = "-DCUTFUSE_CUTLASS_DIR=<a CUTLASS 4.2.0 folder"


def cutlass_folder(folder: Path, version: tuple[int, int, int]) -> Path:
    header = folder / "include" / "cutlass" / "version.h"
    header.parent.mkdir(parents=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), version, strict=True)
    header.write_text("".join(f"#define CUTLASS_{part} {number}\n" for part, number in parts))
    return folder


def test_tampered_download_is_refused(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    with zipfile.ZipFile(mirror / WHEEL, "w") as archive:
        archive.writestr("nvidia_cutlass-4.2.0.0.dist-info/METADATA", METADATA)
        archive.writestr("cutlass_library/source/include/cutlass/version.h", "// not CUTLASS")
    build = tmp_path / "build"
    result = configure(build, NO_COMPILER, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(mirror))
    assert result.returncode != 0
    assert "is not the one that" in result.stdout
    assert "tampered with or damaged" in result.stdout
    assert OVERRIDE in result.stdout
    assert not list(build.rglob("version.h"))


def test_missing_download_names_the_remedy(tmp_path: Path) -> None:
    empty = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    result = configure(tmp_path / "build", NO_COMPILER, **empty)
    assert result.returncode != 0
    assert "No CUTLASS 4.2.0. pip could not download it. Check the network" in result.stdout
    assert OVERRIDE in result.stdout


def test_folder_replaces_the_download(tmp_path: Path) -> None:
    folder = cutlass_folder(tmp_path / "cutlass", (4, 2, 0))
    empty = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    option = f"-DCUTFUSE_CUTLASS_DIR={folder}"
    result = configure(tmp_path / "build", NO_COMPILER, option, **empty)
    assert f"CUTLASS 4.2.0: {folder}" in result.stdout
    assert "Fetching" not in result.stdout
    assert "is not tested" not in result.stdout


def test_folder_of_another_version_warns(tmp_path: Path) -> None:
    folder = cutlass_folder(tmp_path / "cutlass", (3, 9, 2))
    result = configure(tmp_path / "build", NO_COMPILER, f"-DCUTFUSE_CUTLASS_DIR={folder}")
    assert "is 3.9.2; the kernels compose collectives of 4.2.0" in result.stdout


def test_folder_without_cutlass_is_refused(tmp_path: Path) -> None:
    result = configure(tmp_path / "build", NO_COMPILER, f"-DCUTFUSE_CUTLASS_DIR={tmp_path}")
    assert result.returncode != 0
    assert f"No CUTLASS in {tmp_path}" in result.stdout
    assert OVERRIDE in result.stdout
