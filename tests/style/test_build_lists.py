"""A source file that no CMakeLists.txt names is dead: each room lists all of its own."""

import re
from pathlib import Path

import pytest

from .repository import ROOT, files, name


@pytest.mark.parametrize("path", files("cpp", suffixes=(".cc", ".cu")), ids=name)
def test_source_is_compiled(path: Path) -> None:
    room = ROOT / "cpp" / path.relative_to(ROOT / "cpp").parts[0]
    listed = re.findall(r"[\w/]+\.(?:cc|cu)\b", (room / "CMakeLists.txt").read_text())
    assert str(path.relative_to(room)) in listed
