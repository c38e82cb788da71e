"""One version: CMake's project version is the package's, and CHANGELOG knows it."""

import re

from .repository import ROOT


def project_version() -> str:
    text = (ROOT / "CMakeLists.txt").read_text()
    match = re.search(r"project\(cutfuse VERSION ([0-9.]+)", text)
    assert match is not None
    return match.group(1)


def test_package_version_is_the_library_version() -> None:
    text = (ROOT / "pycutfuse" / "__init__.py").read_text()
    assert re.search(r'^__version__ = "(.+)"', text, re.M)[1] == project_version()


def test_changelog_has_the_version_or_unreleased_changes() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(.+?)\]", text, re.M)[0] in ("Unreleased", project_version())


def test_python_reads_the_pinned_versions() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    pinned = (ROOT / "third_party/requirements-pybind11.txt").read_text().split()[0]
    assert f'"{pinned}"' in pyproject
    cutlass = (ROOT / "third_party/requirements-cutlass.txt").read_text()
    expected = re.search(r"set\(expected (.+)\)", (ROOT / "cpp/cmake/cutlass.cmake").read_text())[1]
    assert cutlass.startswith(f"nvidia-cutlass=={expected}.")
