"""Loads the native binding `_C` and libcutfuse once, on first use; never raises, keeps a diagnosis.

The files are looked at before they are mapped: a truncated shared object ends the process with
SIGBUS when the dynamic loader touches a page past its end.
"""

import importlib
import platform
import struct
import sys
import threading
from dataclasses import dataclass
from importlib import machinery
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = Path(__file__).resolve().parent
LIBRARY_NAME = "libcutfuse.so"
REMEDY = (
    "Rebuild with `cmake --preset release && cmake --build --preset release` or `pip install .`"
)

# What _C.pyi promises; `info` says which of them a binding lacks.
INTERFACE = (
    "ABI_VERSION abi_version version build_info device_count OPS MAX_STEPS TAILS DeviceProps "
    "query_device check_device GemmPolicy compiled_policies select_policy Program FusedProblem "
    "Plan ChainPlan why_not why_slower why_not_chain make_plan make_chain bind replay run_chain "
    "planes_layout split "
    "LogSumExpPlan plan_logsumexp logsumexp merge_logsumexp_partials"
).split()

_MACHINES = {"x86_64": 62, "aarch64": 183}  # ELF e_machine


@dataclass(frozen=True)
class Native:
    """The binding, or None and why it is not there."""

    binding: Any  # the module that _C.pyi describes; typed Any because it may be absent
    diagnosis: str | None
    missing: tuple[str, ...] = ()


def elf_problem(path: Path) -> str | None:
    """Say why `path` is no complete shared object for this machine, None if it looks like one."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(64)
            if len(header) < 64 or header[:4] != b"\x7fELF":
                return f"{path} ({size} bytes) is no shared object (no ELF header)"
            if header[4] != 2 or header[5] != 1:
                return f"{path} is no 64-bit little-endian shared object"
            machine = struct.unpack_from("<H", header, 18)[0]
            expected = _MACHINES.get(platform.machine())
            if expected is not None and machine != expected:
                return f"{path} is for another processor (ELF machine {machine}, here {expected})"
            program, section = struct.unpack_from("<QQ", header, 32)
            entry, count, section_entry, sections = struct.unpack_from("<HHHH", header, 54)
            end = max(program + entry * count, section + section_entry * sections)
            file.seek(program)
            table = file.read(entry * count)
            for start in range(0, len(table) - 55, max(entry, 56)):
                offset, length = (struct.unpack_from("<Q", table, start + at)[0] for at in (8, 32))
                end = max(end, offset + length)
    except (OSError, struct.error) as error:
        return f"{path} cannot be read: {error}"
    if size < end:
        return f"{path} is truncated: {size} bytes, its header promises {end}"
    return None


def _find_binding(package: Path) -> tuple[Path | None, str | None]:
    for suffix in machinery.EXTENSION_SUFFIXES:
        path = package / f"_C{suffix}"
        if path.exists():
            return path, None
    here = f"{sys.implementation.cache_tag} ({platform.machine()})"
    others = sorted(path.name for path in package.glob("_C*.so"))
    if others:
        return None, f"{package} has {', '.join(others)}, but this Python is {here}. {REMEDY}"
    return None, (
        f"the native binding _C is not built ({package} has none for {here}). It needs nvcc: "
        f"install the CUDA toolkit 13.0 or newer, or give pip "
        f"-Ccmake.define.CUTFUSE_PREBUILT_DIR=<folder of {LIBRARY_NAME}>. {REMEDY}"
    )


def inspect_files(package: Path) -> str | None:
    """Diagnose the shared objects in `package` without mapping them; None if they look right."""
    binding, diagnosis = _find_binding(package)
    if binding is None:
        return diagnosis
    for path in (binding, package / LIBRARY_NAME):
        if path.exists():
            problem = elf_problem(path)
            if problem is not None:
                return f"{problem}. {REMEDY}"
    return None


def inspect_binding(binding: ModuleType) -> Native:
    """Check that `binding` and the library behind it fit each other and this package."""
    missing = tuple(name for name in INTERFACE if not hasattr(binding, name))
    if missing:
        text = (
            f"the binding {binding.__name__} lacks {', '.join(missing)}: it is of another version"
        )
        return Native(None, f"{text}. {REMEDY}", missing)
    found, expected = binding.abi_version(), binding.ABI_VERSION
    if found != expected:
        text = f"{LIBRARY_NAME} has ABI {found}, but the binding was compiled for ABI {expected}"
        return Native(None, f"{text}: the two are of different versions. {REMEDY}")
    return Native(binding, None)


def _load() -> Native:
    diagnosis = inspect_files(PACKAGE)
    if diagnosis is not None:
        return Native(None, diagnosis)
    try:
        return inspect_binding(importlib.import_module("pycutfuse._C"))
    except Exception as error:  # an extension module may raise anything while it initialises
        text = f"the native binding did not load: {error}"
        return Native(None, f"{text}. {LIBRARY_NAME} is missing, foreign or damaged. {REMEDY}")


_native: Native | None = None
_lock = threading.Lock()


def native() -> Native:
    """Load the binding at the first call; afterwards the same answer."""
    global _native
    if _native is None:
        with _lock:
            if _native is None:
                _native = _load()
    return _native
