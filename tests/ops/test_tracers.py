"""torch.jit.trace records the plain chain, torch.fx is refused with the way out."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import pycutfuse as pcf

MODULES: dict[str, Any] = {
    "linear": lambda: pcf.nn.Linear(3, 4, epilogue=(pcf.relu(),)),
    "logsumexp": lambda: pcf.nn.LinearLogSumExp(3, 4),
    "norm": lambda: pcf.nn.LinearScaleBatchNorm1d(3, 4, (4,)).eval(),
    "two linears": lambda: pcf.nn.LinearSigmoidLinearLogSumExp(3, 4, 5),
    "conv": lambda: pcf.nn.Conv2d(3, 4, 2, epilogue=(pcf.relu(),)),
    "transposed": lambda: pcf.nn.ConvTranspose2d(3, 4, 2),
    "conv norm": lambda: pcf.nn.Conv2dBatchNorm2dScale(3, 4, 2, 2.0).eval(),
}


def input_of(name: str, batch: int = 2) -> Tensor:
    shape = (batch, 3, 5, 5) if "conv" in name or name == "transposed" else (batch, 3)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_a_traced_module_computes_and_learns(name: str, grad: bool) -> None:
    layer = MODULES[name]().requires_grad_(grad)
    traced = torch.jit.trace(layer, (input_of(name),))
    assert any("torch.jit.trace" in reason for reason in pcf.counters()["fallback"]) == grad
    x = input_of(name, 3)
    torch.testing.assert_close(traced(x), layer(x))
    if grad:
        traced(x).sum().backward()
        assert all(one.grad is not None for one in layer.parameters())


def test_a_traced_logsumexp() -> None:
    x = input_of("linear").requires_grad_()
    traced = torch.jit.trace(lambda x: pcf.ops.logsumexp(x, 1), (x,))
    torch.testing.assert_close(traced(x), torch.logsumexp(x, 1))


class Leaves(fx.Tracer):
    """As the message of the refusal says."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return type(module).__module__.startswith("pycutfuse") or super().is_leaf_module(
            module, name
        )


@pytest.mark.parametrize("name", MODULES)
def test_fx_needs_leaves(name: str) -> None:
    model, x = nn.Sequential(MODULES[name](), nn.ReLU()), input_of(name)
    for _ in range(2):
        with pytest.raises(TypeError, match="is_leaf_module"):
            fx.symbolic_trace(model)
        model(x)
    traced = fx.GraphModule(model, Leaves().trace(model))
    torch.testing.assert_close(traced(x), model(x))
