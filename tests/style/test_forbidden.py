"""What must not be in the sources: unfinished marks, calls that the library never makes."""

import re
from pathlib import Path

import pytest

from .repository import CPP, ROOT, files, name

LIBRARY = files("cpp", "include", suffixes=(*CPP, ".cmake", ".txt"))
EVERYTHING = LIBRARY + files(
    "pycutfuse", "tests", "benchmarks/problems", "tools", suffixes=(".py", ".pyi", ".cc")
)
# Written so that this file does not hold what it looks for.
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")))
# The library allocates nothing, never waits for the GPU, never ends the process, and keeps IEEE
# arithmetic: Python allocates, and fast-math is no global option.
CALLS = re.compile(
    r"\b(?:exit|abort|_exit)\(|cudaMalloc|cudaFree\b|cudaDeviceSynchronize|cudaStreamSynchronize"
    r"|cudaDeviceReset|use_fast_math|ffast-math"
)


@pytest.mark.parametrize("path", EVERYTHING, ids=name)
def test_no_unfinished_marks(path: Path) -> None:
    assert UNFINISHED.findall(path.read_text()) == []


@pytest.mark.parametrize("path", [*LIBRARY, ROOT / "CMakeLists.txt"], ids=name)
def test_library_never_calls(path: Path) -> None:
    assert CALLS.findall(path.read_text()) == []


def test_no_third_party_source_is_kept() -> None:
    kept = files("third_party", suffixes=(".h", ".hpp", ".cuh", ".inl", ".whl", ".cu", ".cc"))
    assert kept == ()


@pytest.mark.parametrize("path", files("pycutfuse", "tests", "tools", suffixes=(".py",)), ids=name)
def test_documents_that_are_named_are_in_the_repository(path: Path) -> None:
    named = set(re.findall(r"\b[A-Z]+\.md\b", path.read_text()))
    assert {one for one in named if not list(ROOT.rglob(one))} == set()
