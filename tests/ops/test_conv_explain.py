"""explain says what a convolution then does, and changes nothing."""

from collections.abc import Iterator

import pytest
import torch

import pycutfuse as pcf
from pycutfuse import _loader, info
from pycutfuse.ops import _launch

from .simulated_conv import ConvBinding, install


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConvBinding]:
    yield install(monkeypatch)
    _launch.clear_caches()


def test_the_cpu_is_a_fallback() -> None:
    layer = pcf.nn.Conv2d(3, 4, 3, epilogue=(pcf.relu(),), precision="ieee")
    found = pcf.explain(layer, torch.ones(1, 3, 8, 8))
    assert (found.operator, found.path, found.tier) == ("conv2d", "fallback", "ieee")
    assert found.program == "add(operand 0) | relu"
    assert pcf.counters() == {"fallback": {}, "handover": {}}


def test_statistics_do_not_change() -> None:
    layer = pcf.nn.Conv2dBatchNorm2dScale(3, 4, 3, 2.0, epilogue=(pcf.relu(),))
    found = pcf.explain(layer, torch.ones(2, 3, 8, 8))
    assert found.program == "add(operand 0) | batch_norm (batch) | mul(2) | relu"
    assert int(layer.bn.num_batches_tracked) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: layer.conv.register_forward_hook(lambda *_: None), "hooks"),
        (lambda layer: layer.double(), "float64"),
        (lambda layer: setattr(layer, "bn", torch.nn.Identity()), "another type"),
        (lambda layer: setattr(layer, "scaling_factor", torch.ones(4, 6, 6)), "scale"),
    ],
)
def test_reasons_of_modules(change, reason: str) -> None:
    layer = pcf.nn.Conv2dBatchNorm2dScale(3, 4, 3, torch.ones(4, 1, 1))
    change(layer)
    found = pcf.explain(layer, torch.ones(2, 3, 8, 8, dtype=layer.conv.weight.dtype))
    assert found.path == "fallback"
    assert reason in found.reason


def test_planned_calls(binding: ConvBinding) -> None:
    x, weight = torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3)
    for operator in (pcf.ops.conv2d, pcf.ops.conv_transpose2d):
        given = weight if operator is pcf.ops.conv2d else weight.transpose(0, 1)
        found = pcf.explain(operator, x, given, precision="ieee")
        assert (found.path, found.tier) == ("fused", "ieee")
        assert found.stages == ("simulated convolution",)
        found = pcf.explain(operator, x, given, precision="torch")
        assert (found.path, found.reason) == ("hand-over", 'precision="torch"')
    found = pcf.explain(pcf.ops.conv2d, torch.ones(1, 130, 8, 8), torch.ones(4, 130, 3, 3))
    assert (found.path, found.reason) == ("hand-over", "more than 128 channels per group")
    found = pcf.explain(pcf.ops.conv2d_batch_norm, x, weight, training=True)
    assert (found.operator, found.path, found.tier) == ("conv2d_batch_norm", "fused", "tf32")
    full = torch.ones(2, 4, 6, 6).transpose(2, 3)
    found = pcf.explain(pcf.ops.conv2d, x, weight, epilogue=(pcf.add(full),))
    assert "operand 0 is copied" in str(found)
    assert binding.launched == 0


def test_invalid_calls_raise_as_the_call() -> None:
    with pytest.raises(RuntimeError, match="channels"):
        pcf.explain(pcf.ops.conv2d, torch.ones(2, 3, 8, 8), torch.ones(4, 5, 3, 3))
    with pytest.raises(ValueError, match="more than 1 value"):
        pcf.explain(pcf.nn.Conv2dBatchNorm2dScale(3, 4, 3, 2.0), torch.ones(1, 3, 3, 3))


def test_info_says_when_the_library_is_older(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = install(monkeypatch)
    monkeypatch.setattr(info, "native", lambda: _loader.Native(binding, None))
    assert "any program" in info._operators()["conv2d"]
    monkeypatch.delattr(ConvBinding, "make_conv_plan")
    assert "has no convolutions" in info._operators()["conv2d"]
    _launch.clear_caches()


@pytest.mark.cuda
def test_a_fused_call_on_the_gpu(cuda: torch.device) -> None:
    layer = pcf.nn.Conv2d(8, 64, 3, device=cuda)
    found = pcf.explain(layer, torch.ones(4, 8, 34, 130, device=cuda))
    assert found.path == "fused", str(found)
    assert "ConvPolicy" in found.policy
