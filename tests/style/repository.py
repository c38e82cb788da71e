"""The repository's own files, as the style tests read them."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPP = (".h", ".cc", ".cu", ".cuh", ".in")

_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


@cache
def files(*folders: str, suffixes: tuple[str, ...]) -> tuple[Path, ...]:
    """Files of `folders` with one of `suffixes`, sorted."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return tuple(sorted(path for path in found if path.suffix in suffixes and path.is_file()))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def includes(text: str) -> list[str]:
    """What a C++ text includes, as written between the brackets or quotes."""
    return _INCLUDE.findall(text)
