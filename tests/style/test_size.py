"""Files and functions stay short enough to be read, and macros stay at three."""

import ast
import re
from pathlib import Path

import pytest

from .repository import CPP, files, name

SOURCES = files("cpp", "include", "tests/cpp", suffixes=CPP) + files(
    "pycutfuse", "benchmarks", "tools", suffixes=(".py", ".pyi")
)
TESTS = files("tests", suffixes=(".py",))
MAX_SOURCE_LINES = 400
MAX_TEST_LINES = 300
MAX_FUNCTION_LINES = 80
MACROS = {"CUTFUSE_API", "CUTFUSE_CHECK", "CUTFUSE_CUDA"}


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_source_file_is_short(path: Path) -> None:
    assert lines(path) <= MAX_SOURCE_LINES


@pytest.mark.parametrize("path", TESTS, ids=name)
def test_test_file_is_short(path: Path) -> None:
    assert lines(path) <= MAX_TEST_LINES


@pytest.mark.parametrize("path", [p for p in SOURCES if p.suffix == ".py"], ids=name)
def test_python_function_is_short(path: Path) -> None:
    long = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            size = (node.end_lineno or 0) - first.lineno + 1  # the docstring is not counted
            if size > MAX_FUNCTION_LINES:
                long[node.name] = size
    assert long == {}


def test_macros_are_three() -> None:
    texts = [path.read_text() for path in files("cpp", "include", suffixes=CPP)]
    defined = {item for text in texts for item in re.findall(r"^\s*#\s*define\s+(\w+)", text, re.M)}
    assert defined <= MACROS
