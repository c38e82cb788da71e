"""Two linear layers and a logsumexp: torch's checks of the raw operators, gradients, detours."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse.ops import _chain, _chain_launch
from pycutfuse.ops._chain import Call, ChainFunction, Layer
from pycutfuse.program import encode, operands_of

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Tagged(Tensor):
    """A subclass with torch's behaviour."""


def draw(*shape: int, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def sample(shape: tuple[int, ...], device: Any, dtype: torch.dtype = torch.float32) -> Call:
    """A call whose programs have operands of every kind."""
    rows = shape[:-1]
    steps = (pcf.mul(draw(6, device=device, dtype=dtype)), pcf.tanh())
    others = (
        pcf.add(draw(4, device=device, dtype=dtype)),
        pcf.mul(draw(*rows, 4, device=device, dtype=dtype)),
    )
    first, second = draw(6, shape[-1], device=device), draw(4, 6, device=device)
    return Call(
        draw(*shape, device=device, dtype=dtype),
        Layer(first.to(dtype), None, None, encode(steps), operands_of(steps)),
        Layer(second.to(dtype), None, None, encode(others), operands_of(others)),
        "default",
    )


def plain(call: Call) -> Tensor:
    (scale,), (bias, full) = call.first.operands, call.second.operands
    hidden = torch.tanh(F.linear(call.x, call.first.weight) * scale)
    return torch.logsumexp((F.linear(hidden, call.second.weight) + bias) * full, -1)


def leaves(call: Call) -> list[Tensor]:
    return [call.x, call.first.weight, *_chain_launch.differentiable(call)]


SHAPES = [(7, 5), (2, 3, 5), (5,)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_operators(shape: tuple[int, ...], device: torch.device) -> None:
    call = sample(shape, device)
    names = torch.ops.pycutfuse
    torch.library.opcheck(names.linear_linear_logsumexp.default, _chain_launch.flat(call))
    lse = names.linear_linear_logsumexp(*_chain_launch.flat(call))
    torch.testing.assert_close(lse, plain(call), **CLOSE)
    x, first, second, precision = call
    parts = [
        (layer.weight, layer.program.codes, layer.program.constants, layer.operands)
        for layer in (first, second)
    ]
    grad = draw(*shape[:-1], device=device)
    for needs in ((True,) * 6, (False, True, False, True, False, True), (False,) * 3 + (True,) * 3):
        arguments = (grad, x, *parts[0], *parts[1], precision, needs)
        torch.library.opcheck(names.linear_linear_logsumexp_backward.default, arguments)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape: tuple[int, ...], device: torch.device) -> None:
    call = sample(shape, device)
    inputs = [tensor.requires_grad_() for tensor in leaves(call)]
    grad = draw(*shape[:-1], device=device)
    ours = torch.autograd.grad(_chain.run(call), inputs, grad)
    theirs = torch.autograd.grad(plain(call), inputs, grad)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_function_passes_gradcheck(shape: tuple[int, ...]) -> None:
    call = sample(shape, "cpu", torch.float64)
    programs = [
        (layer.program.codes, layer.program.constants) for layer in (call.first, call.second)
    ]

    def function(x: Tensor, first: Tensor, *others: Tensor) -> Tensor:
        scale, second, *operands = others
        head = (x, first, second, None, None, None, None, *programs, 1, "default", None)
        return ChainFunction.apply(*head, scale, *operands)

    inputs = [tensor.requires_grad_() for tensor in leaves(call)]
    torch.testing.assert_close(function(*inputs), plain(call))
    assert torch.autograd.gradcheck(function, inputs)


def test_double_backward_is_refused(device: torch.device) -> None:
    call = sample((7, 5), device)
    call.x.requires_grad_()
    (grad,) = torch.autograd.grad(_chain.run(call).square().sum(), call.x, create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        grad.sum().backward()


def test_float64_runs_as_torch(device: torch.device) -> None:
    call = sample((7, 5), device, torch.float64)
    assert torch.equal(_chain.run(call), plain(call))
    call.x.requires_grad_()
    run = lambda x: _chain.run(call._replace(x=x))  # noqa: E731
    assert torch.autograd.gradgradcheck(run, (call.x,))
    assert f"{_chain.NAME}: dtype float64" in pcf.counters()["fallback"]


def test_detours(device: torch.device) -> None:
    call = sample((7, 5), device)
    expected = plain(call)
    tagged = _chain.run(call._replace(x=call.x.as_subclass(Tagged)))
    assert type(tagged) is Tagged
    weight = call.second.weight
    tagged = call.second._replace(weight=weight.as_subclass(Tagged))
    torch.testing.assert_close(_chain.run(call._replace(second=tagged)), expected, **CLOSE)
    vector = call.second._replace(program=encode(()), operands=())
    simple = call._replace(second=vector)
    mapped = torch.func.vmap(lambda x: _chain.run(simple._replace(x=x)))(call.x)
    torch.testing.assert_close(mapped, _chain.run(simple), **CLOSE)
    reasons = " ".join(pcf.counters()["fallback"])
    assert all(word in reasons for word in ("Tagged", "torch.func"))
    with torch.inference_mode():
        torch.testing.assert_close(_chain.run(call), expected, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_mixed_dtypes_raise_as_torch(dtype: torch.dtype, device: torch.device) -> None:
    call = sample((7, 5), device)
    for changed in (
        call._replace(x=call.x.to(dtype)),
        call._replace(first=call.first._replace(weight=call.first.weight.to(dtype))),
        call._replace(second=call.second._replace(weight=call.second.weight.to(dtype))),
    ):
        with pytest.raises(RuntimeError):
            plain(changed)
        with pytest.raises(RuntimeError):
            _chain.run(changed)


@pytest.mark.parametrize("name", ["linear1", "linear2"])
def test_a_bias_of_another_dtype_raises_as_torch(name: str, device: torch.device) -> None:
    layer = pcf.nn.LinearSigmoidLinearLogSumExp(3, 4, 5, device=device)
    bias = getattr(layer, name).bias
    bias.data = bias.data.bfloat16()
    for call in (layer, layer.to_torch()):
        with pytest.raises(RuntimeError):
            call(torch.ones(2, 3, device=device))


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((63, 64, 64), "K=63"),
        ((64, 63, 64), "K=63"),
        ((0, 64, 64), "an empty problem"),
        ((64, 0, 64), "an empty problem"),
        ((64, 64, 0), "an empty problem"),
    ],
)
def test_what_is_handed_over(sizes, reason: str, cuda: torch.device) -> None:
    pcf.set_fallback_policy("error")
    layer = pcf.nn.LinearSigmoidLinearLogSumExp(*sizes, device=cuda, precision="ieee")
    x = draw(9, sizes[0], device=cuda)
    found = pcf.explain(layer, x)
    assert found.path == "hand-over"
    assert reason in found.reason
    torch.testing.assert_close(layer(x), layer.to_torch()(x))
    (key,) = pcf.counters()["handover"]
    assert key.startswith(_chain.NAME)


@pytest.mark.cuda
def test_an_unbounded_program_between_float32_layers_is_handed_over(cuda: torch.device) -> None:
    weights = draw(64, 64, device=cuda), draw(32, 64, device=cuda)
    for dtype, calls in ((torch.float32, 1), (torch.bfloat16, 0)):
        pcf.reset_counters()
        first, second = (
            Layer(weight.to(dtype), None, None, encode(program), ())
            for weight, program in zip(weights, ((pcf.relu(),), ()), strict=True)
        )
        x = draw(9, 64, device=cuda, dtype=dtype)
        result = _chain.run(Call(x, first, second, "ieee"))
        hidden = torch.relu(x.double() @ first.weight.double().T)
        exact = torch.logsumexp(hidden @ second.weight.double().T, -1)
        torch.testing.assert_close(result.double(), exact, rtol=0.03, atol=0.01)
        assert sum(pcf.counters()["handover"].values()) == calls


def test_explain(device: torch.device) -> None:
    layer = pcf.nn.LinearSigmoidLinearLogSumExp(80, 72, 64, device=device)
    found = pcf.explain(layer, draw(9, 80, device=device))
    assert found.operator == _chain.NAME
    assert found.path == ("fused" if device.type == "cuda" else "fallback"), str(found)
    words = "add(operand 0) | sigmoid | linear | add(operand 0) | logsumexp"
    assert found.program == words
    assert pcf.explain(layer, draw(2, 9, 80, device=device)).reason == "an input of 3 dimensions"
    with pytest.raises(RuntimeError, match="features"):
        pcf.explain(layer, draw(9, 79, device=device))
    layer.precision = "torch"
    path = "hand-over" if device.type == "cuda" else "fallback"  # as the call counts it
    assert pcf.explain(layer, draw(9, 80, device=device)).path == path
