"""Memory of a launch is taken past torch's dispatcher only where that cannot be told apart."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pycutfuse as pcf
from pycutfuse.ops import _launch, _linear, _memo, _workspace
from pycutfuse.testing import guarded

from .simulated import Binding, install

_guards: Any = torch._C._dynamo.guards


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Binding]:
    """The simulated binding behind the modules: host tensors are launched."""
    monkeypatch.setattr(_linear, "_forward_op", _linear._forward_cuda)
    _workspace.blank_of.cache_clear()
    yield install(monkeypatch)
    _launch.clear_caches()
    _workspace.blank_of.cache_clear()


def made(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


@pytest.mark.parametrize(
    "found",
    [
        lambda *given: None,
        lambda shape, strides, dtype: made(shape, strides, torch.float32),
        lambda shape, strides, dtype: made((3, 2)[: len(shape)], (2, 1)[: len(shape)], dtype),
        lambda shape, strides, dtype: made(shape, (1, 2)[: len(shape)], dtype),
        lambda shape, strides, dtype: torch.nn.Parameter(made(shape, strides, dtype)),
        lambda shape, strides, dtype: torch.empty(shape, dtype=dtype, device="meta"),
        lambda shape, strides: made(shape, strides, torch.float16),
    ],
    ids="none dtype shape strides class device signature".split(),
)
def test_the_allocator_is_tried(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _workspace.blank_of.cache_clear()
    assert _workspace.blank_of("cpu") is not None
    _workspace.blank_of.cache_clear()
    monkeypatch.setattr(_guards, "_empty_strided_cpu", found)
    assert _workspace.blank_of("cpu") is None
    _workspace.blank_of.cache_clear()
    assert _workspace.blank_of("a device of next year") is None
    _workspace.blank_of.cache_clear()


def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    inner = _guards._empty_strided_cpu
    monkeypatch.setattr(
        _guards, "_empty_strided_cpu", lambda *given: shapes.append(given[0]) or inner(*given)
    )
    return shapes


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (6,)], ids=str)
@pytest.mark.parametrize("kind", [pcf.nn.Linear, pcf.nn.LinearLogSumExp])
def test_results_are_those_of_torch(shape: Any, kind: Any, binding: Binding) -> None:
    layer, x = kind(6, 4, precision="ieee"), torch.rand(shape)
    with torch.no_grad():
        for _ in range(4):
            result, wanted = layer(x), layer.to_torch()(x)
            torch.testing.assert_close(result, wanted)
            assert result.stride() == wanted.stride()


def test_deterministic_guarded_and_other_devices_allocate_by_torch(
    binding: Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = asked(monkeypatch)
    layer, x = pcf.nn.Linear(6, 4, precision="ieee"), torch.rand(5, 6)
    with torch.no_grad():
        layer(x)
        tried = len(shapes)
        layer(x)
        assert shapes[tried:] == [(5, 4)]
        with guarded():
            layer(x)
        torch.use_deterministic_algorithms(True)
        try:
            layer(x)
        finally:
            torch.use_deterministic_algorithms(False)
        monkeypatch.setattr(_workspace, "_current_device", lambda: 0)
        layer(x)
        assert shapes[tried:] == [(5, 4)]


def test_absent_tensors_have_no_address() -> None:
    assert {tensor.data_ptr() for tensor in _memo.ABSENT} == {0}
