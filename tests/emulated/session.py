"""Operators over emulated kernels: host tensors take the road of CUDA tensors.

To be imported before anything has loaded the native library, in a process of its own: pybind11
knows each type of the binding once.
"""

import importlib.util
import shutil
import sys
import tempfile
from importlib import machinery
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pycutfuse import _loader, support
from pycutfuse.ops import _conv_launch, _frozen, _gate, _launch, _logsumexp, _workspace

ALIGNMENT = 256
CANARY = 512


def _load(library: Path) -> Any:
    """The binding, with `library` in the place of the real one."""
    name = f"_C{machinery.EXTENSION_SUFFIXES[0]}"
    folder = Path(tempfile.mkdtemp(prefix="pycutfuse-emulated-"))
    try:
        shutil.copy(_loader.PACKAGE / name, folder)
        shutil.copy(library, folder / "libcutfuse.so")
        spec = importlib.util.spec_from_file_location("pycutfuse._C", folder / name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        shutil.rmtree(folder)
    return module


def open_library(library: Path) -> Any:
    """Let the package find the emulated kernels; returns the binding."""
    assert _loader._native is None
    assert "pycutfuse._C" not in sys.modules
    found = _loader.inspect_binding(_load(library))
    assert found.binding is not None, found.diagnosis
    assert found.binding.build_info() == "emulated"
    _loader._native = found
    return found.binding


class Arena:
    """Workspaces of one call after the other, each between canaries, filled with NaN."""

    def __init__(self) -> None:
        self.owner: Tensor | None = None
        self.size = 0

    def check(self) -> None:
        """Fail if a kernel wrote beside its workspace."""
        if self.owner is not None:
            at = (-self.owner.data_ptr() - CANARY) % ALIGNMENT + CANARY
            assert (self.owner[:at] == 255).all()
            assert (self.owner[at + self.size :] == 255).all()

    def scratch(self, size: int, *_: object) -> tuple[int, Tensor]:
        self.check()
        self.size = size
        self.owner = torch.full((size + ALIGNMENT + 2 * CANARY,), 255, dtype=torch.uint8)
        start = self.owner.data_ptr() + CANARY
        return start + -start % ALIGNMENT, self.owner


def install(patch: pytest.MonkeyPatch, binding: Any) -> Arena:
    """Take the operators to the kernels, as far as one test goes."""
    arena = Arena()
    use_device(patch, binding.DeviceProps(sm_count=4))
    patch.setattr(support, "device_problem", lambda index: None)
    patch.setattr(_gate, "_ON_CPU", _gate._DTYPES)
    for module in (_conv_launch, _frozen, _launch, _logsumexp):
        patch.setattr(module, "raw_stream", lambda index: 0)
    patch.setattr(_workspace, "scratch", arena.scratch)
    patch.setattr(_workspace, "allocate", arena.scratch)
    return arena


def use_device(patch: pytest.MonkeyPatch, device: Any) -> None:
    """Plan for `device`: of few multiprocessors, as all their blocks may have to run at once."""
    patch.setattr(support, "device_props", lambda index: device)
    _launch.clear_caches()
