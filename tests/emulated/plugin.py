"""pytest over emulated kernels: `pytest -p tests.emulated.plugin tests/numerics/...`.

Tensors of tests that ask for "cuda" lie on the host and take the road of CUDA tensors, down to the
kernels of the library that CUTFUSE_EMULATED names.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from pycutfuse import _library

_define = _library.define


def _define_for_the_host(name: str, schema: str, **kernels: Any) -> Any:
    return _define(name, schema, **{**kernels, "cpu": kernels["cuda"]})


_library.define = _define_for_the_host  # before any operator is defined

from . import session  # noqa: E402

binding = session.open_library(Path(os.environ["CUTFUSE_EMULATED"]))


class Host(TorchFunctionMode):
    """The host for every device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.cuda:
            return args[0]
        args = [_on_host(one) for one in args]
        return func(*args, **{name: _on_host(one) for name, one in (kwargs or {}).items()})


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


def pytest_configure() -> None:
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda *_: None
    Host().__enter__()


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    arena = session.install(monkeypatch, binding)
    yield
    arena.check()
