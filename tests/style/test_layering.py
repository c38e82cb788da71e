"""Includes and imports go down only: a room never knows a room above it."""

import ast
from pathlib import Path

import pytest

from .repository import CPP, ROOT, files, includes, name

# Each room, and the rooms it may include. batch_norm lies under gemm: its affine step is a part of
# the GEMM's epilogue.
BASE = {"core", "device"}
CPP_ROOMS = {
    "core": set(),
    "device": {"core"},
    "program": BASE,
    "split": BASE,
    "batch_norm": BASE | {"program"},
    "row_reduce": BASE,
    "simt": BASE | {"program"},
    "skinny": BASE,
    "gemm": BASE | {"program", "split", "batch_norm"},
    "fused": BASE | {"program", "split", "batch_norm", "row_reduce", "simt", "skinny", "gemm"},
    "conv": BASE | {"program", "split", "batch_norm", "gemm", "fused"},
    "bindings": set(),  # sees the contract only
}
CPP_FILES = files("cpp", suffixes=CPP)

# Floors of the Python package, lowest first. A module imports its own floor and those below.
PYTHON_FLOORS = (
    ("errors", "program", "geometry", "_loader", "_knobs", "_console"),
    ("config", "support", "_library"),
    ("reference",),
    ("ops",),
    ("nn",),
    ("explaining", "freezing"),
    ("",),  # the package itself: what users see, and what the rooms above use
    ("info", "testing"),
    ("bench",),
    ("__main__",),
)
PYTHON_FILES = files("pycutfuse", suffixes=(".py",))


def cpp_room(path: Path) -> str:
    return path.relative_to(ROOT / "cpp").parts[0]


@pytest.mark.parametrize("path", CPP_FILES, ids=name)
def test_cpp_room_includes_only_lower_rooms(path: Path) -> None:
    room = cpp_room(path)
    assert room in CPP_ROOMS, f"{room}: a new room needs its floor here"
    rooms = {item.split("/")[0] for item in includes(path.read_text())}
    assert rooms & set(CPP_ROOMS) <= CPP_ROOMS[room] | {room}


def test_cpp_floors_have_no_cycle() -> None:
    seen: set[str] = set()
    for room, below in CPP_ROOMS.items():  # written from the bottom up
        assert below <= seen, room
        seen.add(room)


@pytest.mark.parametrize("path", CPP_FILES, ids=name)
def test_cpp_names_cutlass_only_in_architecture_folders(path: Path) -> None:
    names = {item.split("/")[0] for item in includes(path.read_text())}
    if {"cutlass", "cute"} & names:
        assert path.parent.name in ("sm80", "sm90")


@pytest.mark.parametrize("path", CPP_FILES, ids=name)
def test_cub_only_in_device_code_and_torch_nowhere(path: Path) -> None:
    names = {item.split("/")[0] for item in includes(path.read_text())}
    assert not {"torch", "ATen", "c10"} & names
    if path.suffix in (".h", ".cc"):
        assert not {"cub", "thrust"} & names
    if cpp_room(path) != "bindings":
        assert "pybind11" not in names


def python_room(module: str) -> str:
    """pycutfuse.nn.linear -> nn; the package itself -> the empty string."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def module_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path) -> set[str]:
    """Modules of this package that `path` imports, anywhere in the file."""
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            # `from pycutfuse import nn` names a room; `from pycutfuse.nn import Linear` is in one.
            submodules = {f"{origin}.{alias.name}" for alias in node.names}
            found |= submodules if origin == "pycutfuse" else {origin}
    return {item for item in found if item.split(".")[0] == "pycutfuse"} - {"pycutfuse._C"}


@pytest.mark.parametrize("path", PYTHON_FILES, ids=name)
def test_python_imports_go_down_only(path: Path) -> None:
    floors = {room: floor for floor, rooms in enumerate(PYTHON_FLOORS) for room in rooms}
    room = python_room(module_of(path))
    assert room in floors, f"{room}: a new room needs its floor here"
    above = {
        item
        for item in imported_modules(path)
        if floors.get(python_room(item), len(PYTHON_FLOORS)) > floors[room]
    }
    assert above == set()
