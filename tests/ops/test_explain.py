"""explain says what the call then does, and changes nothing."""

from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn

import pycutfuse as pcf
from pycutfuse import config

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


MODULES: dict[str, Any] = {
    "linear": lambda: pcf.nn.Linear(3, 4),
    "logsumexp": lambda: pcf.nn.LinearLogSumExp(3, 4),
    "norm": lambda: pcf.nn.LinearScaleBatchNorm1d(3, 4, (4,)).eval(),
    "two linears": lambda: pcf.nn.LinearSigmoidLinearLogSumExp(3, 4, 5),
    "conv": lambda: pcf.nn.Conv2d(3, 4, 1),
    "conv norm": lambda: pcf.nn.Conv2dBatchNorm2dScale(3, 4, 1, 2.0).eval(),
}


def _input(name: str) -> torch.Tensor:
    return torch.ones(2, 3, 3, 3) if "conv" in name else torch.ones(2, 3)


@pytest.mark.parametrize("name", MODULES)
def test_torchs_tier_on_the_cpu_is_what_the_call_counts(name: str) -> None:
    layer, x = MODULES[name](), _input(name)
    layer.precision = "torch"
    layer(x)
    found = pcf.explain(layer, x)
    assert config.counters()["fallback"] == {f"{found.operator}: {found.reason}": 1}
    assert found.path == "fallback"


def test_logsumexp_at_torchs_tier() -> None:
    with pcf.precision("torch"):
        pcf.ops.logsumexp(torch.ones(2), 0)
        found = pcf.explain(pcf.ops.logsumexp, torch.ones(2), 0)
    assert (found.path, sum(config.counters()["handover"].values())) == ("hand-over", 1)


@pytest.mark.parametrize("kind", MODULES)
def test_wrong_arguments_raise_as_the_call(kind: str) -> None:
    layer, x = MODULES[kind](), _input(kind)
    for given, options in (((), {}), ((x, x, x), {}), ((), {"y": x}), ((None,), {})):
        for call in (layer, partial(pcf.explain, layer)):
            with pytest.raises(TypeError):
                call(*given, **options)
    for call in (layer, partial(pcf.explain, layer)):
        with pytest.raises(RuntimeError):
            call(x.int())
    (_, name, *_) = signature(type(layer).forward).parameters
    assert str(pcf.explain(layer, **{name: x})) == str(pcf.explain(layer, x))


@pytest.mark.parametrize("other", [[1], {}, nn.Linear(1, 1), print])
def test_what_cannot_be_explained(other: object) -> None:
    with pytest.raises(TypeError, match="no pycutfuse module or operator"):
        pcf.explain(other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [({}, "linear: missing a required argument: 'weight'"), ({"stride": 2}, "linear: .*'stride'")],
)
def test_wrong_arguments_name_the_operator(options: dict[str, int], words: str) -> None:
    weights = [torch.ones(4, 3)] if options else []
    with pytest.raises(TypeError, match=words):
        pcf.explain(pcf.ops.linear, torch.ones(2, 3), *weights, **options)
