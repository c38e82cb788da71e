"""The binding and the host test module; conftest.py leaves out what no build here can have."""

import importlib.util
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycutfuse._loader import native

ROOT = Path(__file__).resolve().parents[2]

INF = math.inf
NAN = math.nan
MAX = 3.4028234663852886e38  # the largest fp32 number
TINY = 1.401298464324817e-45  # the smallest
NORMAL = 1.1754943508222875e-38  # the smallest that is normal
# Zeros, denormals, the edges of the range, and where exp() saturates or overflows.
_MAGNITUDES = (0.0, TINY, 1e-40, NORMAL, 0.5, 1.0, 3.0, 20.0, 88.8, 104.0, 1e13, 1e38, MAX, INF)
SPECIAL = (*_MAGNITUDES, *(-value for value in _MAGNITUDES), NAN)


def binding() -> Any:
    """pycutfuse._C."""
    loaded = native()
    if loaded.binding is None:
        raise RuntimeError(f"{loaded.diagnosis}; `make build` makes it")
    return loaded.binding


def host_modules() -> list[Path]:
    """Builds of host_module.cc, one for each build tree that has it."""
    where = os.environ.get("CUTFUSE_HOST_TESTS")
    folders = [Path(where)] if where else list(ROOT.glob("build/*/tests"))
    return [path for folder in folders for path in folder.glob("pycutfuse_host_tests*.so")]


def host_module() -> Any:
    """The module of host_module.cc, from the build tree that was built last."""
    found = host_modules()
    if not found:
        raise RuntimeError("the host test module is not built; `make build` makes it")
    newest = max(found, key=lambda path: path.stat().st_mtime)
    spec = importlib.util.spec_from_file_location("pycutfuse_host_tests", newest)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(*steps: tuple[Any, ...]) -> Any:
    """A program of steps (name, constant, constant) or (name, "operand", index)."""
    _C = binding()
    codes: list[int] = []
    constants: list[float] = []
    for name, *arguments in steps:
        if arguments[:1] == ["operand"]:
            codes += [_C.OPS[name], arguments[1]]
            constants += [0.0, 0.0]
        else:
            codes += [_C.OPS[name], -1]
            constants += [*arguments, 0.0, 0.0][:2]
    return _C.Program(codes, constants)


def bits(value: float) -> bytes:
    """Bits of an fp32 value, with one pattern for every NaN."""
    return b"nan" if math.isnan(value) else struct.pack("<f", value)


def values_of(made: Any, values: Sequence[float], operands: Sequence[float] = ()) -> list[float]:
    return [made.run(value, operands) for value in values]
