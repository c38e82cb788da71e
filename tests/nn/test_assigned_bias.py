"""A bias may be assigned or removed after construction, as in torch."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import pycutfuse as pcf
from pycutfuse.ops import _launch, _linear

from ..ops.simulated import Binding, install

FACTOR = torch.tensor([2.0, -1.0, 0.5, 3.0])
EPILOGUES = {"bare": (), "step": (pcf.mul(FACTOR), pcf.relu())}
KINDS = {
    "linear": lambda bias, steps: pcf.nn.Linear(3, 4, bias, epilogue=steps),
    "logsumexp": lambda bias, steps: pcf.nn.LinearLogSumExp(3, 4, bias, epilogue=steps),
    "conv": lambda bias, _: pcf.nn.Conv2d(3, 4, 1, bias=bias),
    "transposed": lambda bias, _: pcf.nn.ConvTranspose2d(3, 4, 1, bias=bias),
}


def batch(kind: str) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(5, 3) if kind in ("linear", "logsumexp") else torch.randn(2, 3, 4, 5)


def follows_torch(layer: nn.Module, kind: str) -> None:
    """More than once: the calls after the first ones are remembered."""
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(layer(batch(kind)), layer.to_torch()(batch(kind)))


@pytest.mark.parametrize("steps", EPILOGUES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_assigned_bias_is_added(kind: str, steps: str) -> None:
    layer = KINDS[kind](False, EPILOGUES[steps])
    follows_torch(layer, kind)
    layer.bias = nn.Parameter(torch.randn(4))
    follows_torch(layer, kind)


@pytest.mark.parametrize("steps", EPILOGUES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_removed_bias_is_not_added(kind: str, steps: str) -> None:
    layer = KINDS[kind](True, EPILOGUES[steps])
    follows_torch(layer, kind)
    layer.bias = None
    follows_torch(layer, kind)
    layer.bias = nn.Parameter(torch.randn(4))
    follows_torch(layer, kind)


@pytest.mark.parametrize("child", ["linear1", "linear2", "gemm", "conv"])
def test_a_bias_of_a_child(child: str) -> None:
    layer: nn.Module
    if child == "gemm":
        layer = pcf.nn.LinearScaleBatchNorm1d(3, 4, (4,)).eval()
    elif child == "conv":
        layer = pcf.nn.Conv2dBatchNorm2dScale(3, 4, 1, 2.0).eval()
    else:
        layer = pcf.nn.LinearSigmoidLinearLogSumExp(3, 4, 4)
    kind = "conv" if child == "conv" else "linear"
    for bias in (None, nn.Parameter(torch.randn(4))):
        layer.get_submodule(child).bias = bias
        follows_torch(layer, kind)


def test_a_bias_beside_sixteen_steps_is_refused() -> None:
    layer = pcf.nn.Linear(3, 4, bias=False, epilogue=(pcf.relu(),) * 16)
    follows_torch(layer, "linear")
    layer.bias = nn.Parameter(torch.randn(4))
    with pytest.raises(ValueError, match="16 and the bias"):
        layer(batch("linear"))


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Binding]:
    """Host tensors take the road of CUDA tensors."""
    monkeypatch.setattr(_linear, "_forward_op", _linear._forward_cuda)
    monkeypatch.setattr(_linear.config, "resolve_tier", lambda precision: "ieee")
    yield install(monkeypatch)
    _launch.clear_caches()


def test_launched_calls_follow(binding: Binding) -> None:
    layer = KINDS["linear"](True, EPILOGUES["step"])
    follows_torch(layer, "linear")
    for bias in (None, nn.Parameter(torch.randn(4)), None):
        layer.bias = bias
        before = binding.launched
        follows_torch(layer, "linear")
        assert binding.launched == before + 3
