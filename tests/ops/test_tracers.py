"""Tracers and counters see operators of torch; torch.fx is refused with the way out."""

import pytest
import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

import pycutfuse as pcf

from ..cases.modules import MODULES, input_of


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_a_traced_module_computes_and_learns(name: str, grad: bool) -> None:
    layer = MODULES[name]().eval().requires_grad_(grad)
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
    model, x = nn.Sequential(MODULES[name](), nn.ReLU()).eval(), input_of(name)
    for _ in range(2):
        with pytest.raises(TypeError, match="is_leaf_module"):
            fx.symbolic_trace(model)
        model(x)
    traced = fx.GraphModule(model, Leaves().trace(model))
    torch.testing.assert_close(traced(x), model(x))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_onnx_is_given_operators_of_torch(
    name: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = MODULES[name]().eval().requires_grad_(grad), input_of(name)
    expected = layer(x)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    exported = torch.export.export(layer, (x,)).run_decompositions()
    traced = torch.jit.trace(layer, (x,))
    for graph, call in ((exported.graph, exported.module()), (traced.graph, traced)):
        assert "pycutfuse::" not in str(graph)
        assert "pycutfuse." not in str(graph).replace("pycutfuse.nn.", "")
        torch.testing.assert_close(call(x), expected)


@pytest.mark.parametrize("name", MODULES)
def test_flops_are_counted(name: str) -> None:
    layer, x, found = MODULES[name](), input_of(name), []
    for module in (layer, layer.to_torch()):
        with FlopCounterMode(display=False) as counter:
            module(x).sum().backward()
        found.append(counter.get_total_flops())
    assert found[0] == found[1] > 0
