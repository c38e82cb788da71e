"""Convolutions under torch.compile and torch.library.opcheck: whole graphs, dynamic sizes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.library import opcheck

import pycutfuse as pcf
from pycutfuse.ops import _conv, _conv_batch_norm, _conv_raw
from pycutfuse.ops import _conv_batch_norm_raw as norm_raw
from pycutfuse.testing import generate

from ..cases.conv import FEW, ConvCase

BACKENDS = ["aot_eager", "inductor"]
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return generate("randn", shape, seed=seed)


def modules(device: torch.device) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    steps = (pcf.mul(nn.Parameter(torch.rand(6, 1, 1, device=device))), pcf.gelu(), pcf.add(2.0))
    scale = nn.Parameter(torch.rand(6, 1, 1, device=device))
    norm = pcf.nn.Conv2dBatchNorm2dScale
    return {
        "conv": pcf.nn.Conv2d(4, 6, 3, padding="same", device=device, epilogue=steps),
        "reflect": pcf.nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", device=device),
        "transposed": pcf.nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, device=device),
        "norm": norm(4, 6, 3, 2.0, device=device, epilogue=(pcf.relu(),)),
        "norm_scale": norm(4, 6, 3, scale, stride=2, momentum=None, device=device),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["conv", "reflect", "transposed", "norm", "norm_scale"])
def test_fullgraph_and_dynamic(backend: str, name: str, device: torch.device) -> None:
    module = modules(device)[name]
    twin = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for batch, height, width in ((3, 9, 8), (2, 12, 7), (4, 8, 8)):
        x = draw((batch, 4, height, width), height).to(device).requires_grad_()
        y = x.detach().clone().requires_grad_()
        one, other = compiled(x), twin(y)
        torch.testing.assert_close(one, other, **CLOSE)
        one.square().sum().backward()
        other.square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, **CLOSE)
    for one, other in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **CLOSE)
    for one, other in zip(module.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    module.eval()
    twin.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), twin(x), **CLOSE)


def test_varying_sizes_compile_once(device: torch.device) -> None:
    counter = torch._dynamo.testing.CompileCounter()
    module = pcf.nn.Conv2d(4, 6, 3, stride=2, device=device)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for batch, size in ((3, 9), (2, 12), (4, 21)):
            compiled(draw((batch, 4, size, size), 1).to(device))
    assert counter.frame_count == 1


@pytest.mark.parametrize("case", FEW, ids=str)
def test_functions_in_a_graph(case: ConvCase, device: torch.device) -> None:
    def call(*tensors: Tensor) -> Tensor:
        return case.ours(*tensors, epilogue=(pcf.clamp(max=1.0),))

    for layout in ("contiguous", "channels_last"):
        tensors = case.draw(draw, layout=layout, device=device)
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        result = compiled(*tensors)
        assert torch.equal(result, call(*tensors))
        assert result.stride() == call(*tensors).stride()


def test_output_size_in_a_graph() -> None:
    module = pcf.nn.ConvTranspose2d(4, 6, 3, stride=2)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for height, extra in ((5, 0), (6, 1), (9, 0)):
        x = draw((2, 4, height, 5), 1)
        size = [2 * height + 1 + extra, 12]
        assert torch.equal(compiled(x, size), module(x, size))


def test_a_changed_factor_is_seen() -> None:
    module = pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, 2.0).eval()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = draw((2, 4, 7, 7), 1)
    for factor in (2.0, 3.0, -0.5):
        module.scaling_factor = factor
        assert torch.equal(compiled(x), module.to_torch()(x))


def check(operator: Any, arguments: tuple[Any, ...]) -> None:
    assert set(opcheck(operator, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", FEW, ids=str)
def test_opcheck(case: ConvCase, layout: str, device: torch.device) -> None:
    prepare = _conv.prepare_conv_transpose2d if case.transposed else _conv.prepare_conv2d
    steps = (pcf.mul(draw((6, 1, 1), 4).to(device)), pcf.tanh())
    tensors = case.draw(draw, layout=layout, device=device)
    call = prepare(*tensors, **case.options, epilogue=steps)
    arguments = _conv_raw.flat(call)
    check(_conv_raw.forward, arguments)
    grad = torch.ones_like(_conv_raw.forward(*arguments))
    needs = [True, True, case.bias, True]
    check(_conv_raw.backward, (grad, *arguments[:3], *arguments[4:], needs))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("training", [True, False])
def test_opcheck_of_batch_norm(training: bool, layout: str, device: torch.device) -> None:
    case = ConvCase(padding=1)
    vectors = [draw((6,), seed).abs().to(device) for seed in (4, 5, 6, 7)]
    names = ("running_mean", "running_var", "bn_weight", "bn_bias")
    call = _conv_batch_norm.prepare(
        *case.draw(draw, layout=layout, device=device),
        padding=1,
        training=training,
        num_batches_tracked=torch.tensor(2, device=device),
        after=(pcf.mul(draw((6, 1, 1), 4).to(device)), pcf.tanh()),
        **dict(zip(names, vectors, strict=True)),
    )
    arguments = norm_raw.flat(call)
    check(norm_raw.forward, arguments)
    out, save = norm_raw.forward(*arguments)
    save = save if training else torch.stack(vectors[:2])
    norm = norm_raw.norm_of(call)
    head = (torch.ones_like(out), *arguments[:3], *arguments[4:13], norm.weight, norm.bias, save)
    check(norm_raw.backward, (*head, training, 1e-5, *arguments[21:], [True] * 6))
