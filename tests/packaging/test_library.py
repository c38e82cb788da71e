"""What libcutfuse.so shows to the world: the contract, and nothing that it must not depend on."""

import re
import subprocess

import pytest

from .building import LIBRARY, ROOT

pytestmark = pytest.mark.skipif(
    not LIBRARY.exists(), reason="no libcutfuse.so: built only with CUDA's nvcc"
)
MAX_MEBIBYTES = 45


def tool(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_exports_only_the_contract() -> None:
    contract = "".join(path.read_text() for path in (ROOT / "include/cutfuse").glob("*.h"))
    declared = set(re.findall(r"^CUTFUSE_API [^;({]*?(\w+|operator==)\(", contract, re.M))
    rows = tool("nm", "-DC", "--defined-only", str(LIBRARY)).splitlines()
    exported = [row.split(maxsplit=2)[2] for row in rows]
    functions = [row for row in exported if "for cutfuse::" not in row]
    assert {row.split("(")[0].split("[")[0].removeprefix("cutfuse::") for row in functions} == (
        declared
    )


def test_needs_only_the_system() -> None:
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", tool("readelf", "-d", str(LIBRARY))))
    system = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1"}
    loaders = {name for name in needed if name.startswith("ld-linux")}
    assert needed - loaders <= system  # cudart is inside, the driver is looked up at run time


def test_is_small() -> None:
    assert LIBRARY.stat().st_size <= MAX_MEBIBYTES * 2**20


def test_binding_finds_the_library_beside_it() -> None:
    bindings = list(LIBRARY.parent.glob("_C*.so"))
    assert bindings
    for binding in bindings:
        text = tool("readelf", "-d", str(binding))
        assert "[libcutfuse.so]" in text
        assert re.search(r"RU?N?PATH.*\[\$ORIGIN\]", text)
