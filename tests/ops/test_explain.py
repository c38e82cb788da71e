"""explain says what the call then does, and changes nothing."""

import pytest
import torch

import pycutfuse as pcf

from . import simulated


def test_the_cpu_is_a_fallback() -> None:
    found = pcf.explain(pcf.nn.Linear(3, 4, epilogue=(pcf.relu(),)), torch.ones(2, 3))
    assert (found.operator, found.path, found.tier) == ("linear", "fallback", "ieee")
    assert str(found).startswith("linear: fallback (cpu tensors)")
    assert pcf.counters() == {"fallback": {}, "handover": {}}


def test_statistics_do_not_change() -> None:
    layer = pcf.nn.LinearScaleBatchNorm1d(3, 4, (4,), epilogue=(pcf.relu(),))
    found = pcf.explain(layer, torch.ones(2, 3))
    assert found.program == "add(operand 0) | mul(operand 1) | batch_norm (batch) | relu"
    assert int(layer.bn.num_batches_tracked) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: layer.gemm.register_forward_hook(lambda *_: None), "hooks"),
        (lambda layer: layer.double(), "float64"),
        (lambda layer: setattr(layer, "bn", torch.nn.Identity()), "another type"),
        (lambda layer: setattr(layer, "scale", torch.nn.Parameter(torch.ones(1, 1, 4))), "scale"),
    ],
)
def test_reasons_of_modules(change, reason: str) -> None:
    layer = pcf.nn.LinearScaleBatchNorm1d(3, 4, (4,))
    change(layer)
    found = pcf.explain(layer, torch.ones(2, 3, dtype=layer.scale.dtype))
    assert found.path == "fallback"
    assert reason in found.reason


def test_a_planned_call(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.install(monkeypatch)
    found = pcf.explain(pcf.ops.linear, torch.ones(2, 3), torch.ones(4, 3))
    assert (found.path, found.reason, found.stages) == ("fused", None, ("simulated stage",))
    assert "2^40" in str(found)
    found = pcf.explain(pcf.ops.linear, torch.ones(2, 5000), torch.ones(4, 5000))
    assert (found.path, found.reason) == ("hand-over", "K is over the limit of 4000")
    found = pcf.explain(pcf.ops.linear, torch.ones(2, 3), torch.ones(4, 3), precision="tf32")
    assert (found.path, found.tier) == ("fused", "tf32")
    found = pcf.explain(pcf.ops.linear, torch.ones(2, 3), torch.ones(4, 3), precision="torch")
    assert (found.path, found.reason) == ("hand-over", 'precision="torch"')


def test_invalid_calls_raise_as_the_call() -> None:
    with pytest.raises(RuntimeError, match="features"):
        pcf.explain(pcf.ops.linear, torch.ones(2, 3), torch.ones(4, 5))
    with pytest.raises(ValueError, match="more than 1 value"):
        pcf.explain(pcf.nn.LinearScaleBatchNorm1d(3, 4, (4,)), torch.ones(1, 3))


@pytest.mark.cuda
def test_a_fused_call_on_the_gpu(cuda: torch.device) -> None:
    layer = pcf.nn.Linear(256, 256, device=cuda)
    found = pcf.explain(layer, torch.ones(128, 256, device=cuda))
    assert found.path == "fused", str(found)
    assert "GemmPolicy" in found.policy
