"""The contract stands alone: no third party in it, and each header compiles by itself."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from .repository import ROOT, files, includes, name

HEADERS = files("include", suffixes=(".h",))
FOREIGN = re.compile(r"(torch|ATen|c10|pybind11|Python\.h|cutlass|cute/|cub/|thrust|cuda)")


def test_there_are_headers() -> None:
    assert len(HEADERS) >= 10


@pytest.mark.parametrize("header", HEADERS, ids=name)
def test_header_includes_nothing_foreign(header: Path) -> None:
    assert [item for item in includes(header.read_text()) if FOREIGN.match(item)] == []


@pytest.mark.parametrize("header", HEADERS, ids=name)
def test_header_compiles_alone(header: Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    where = ["-I", str(ROOT / "include"), "-x", "c++", "-"]
    source = f'#include "{header.relative_to(ROOT / "include")}"\n'
    command = [compiler, *flags, *where]
    result = subprocess.run(command, input=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("header", HEADERS, ids=name)
def test_header_is_a_documented_file(header: Path) -> None:
    text = header.read_text()
    assert text.startswith("/// \\file\n")
    assert "#pragma once" in text
    assert "using namespace" not in text
