"""linear_logsumexp: torch's answers, gradients, errors, detours, and torch.compile."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

import pycutfuse as pcf
from pycutfuse.ops._linear_logsumexp import LinearLogSumExpFunction
from pycutfuse.program import encode

from ..cases.invalid import LINEAR, InvalidCase
from ..cases.programs import CHAINS, PROGRAMS, ProgramCase
from ..cases.sizes import EMPTY, SMALL, SizeCase

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Tagged(Tensor):
    """A subclass with torch's behaviour."""


def draw(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def chain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.logsumexp(F.linear(x, weight, bias), -1)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("size", SMALL + EMPTY, ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_sizes(size: SizeCase, grad: bool, device: torch.device) -> None:
    x = draw(*size.leading, size.k, device=device)
    weight, bias = draw(size.n, size.k, device=device), draw(size.n, device=device)
    inputs = [tensor.requires_grad_(grad) for tensor in (x, weight, bias)]
    others = copies(inputs)
    ours, theirs = pcf.ops.linear_logsumexp(*inputs), chain(*others)
    assert ours.shape == theirs.shape == size.leading
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    if grad:
        ours.sum().backward()
        theirs.sum().backward()
        for one, other in zip(inputs, others, strict=True):
            torch.testing.assert_close(one.grad, other.grad, **CLOSE)


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_programs_and_their_gradients(program: ProgramCase, device: torch.device) -> None:
    inputs = [draw(*shape, device=device).requires_grad_() for shape in ((6, 5), (4, 5), (4,))]
    inputs += [o.requires_grad_() for o in program.operands(6, 4, device=str(device))]
    others = copies(inputs)
    ours = pcf.ops.linear_logsumexp(*inputs[:3], epilogue=program.build(inputs[3:]))
    theirs = torch.logsumexp(program.plain(F.linear(*others[:3]), others[3:]), -1)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    grad = draw(6, device=device)
    ours.backward(grad)
    theirs.backward(grad)
    for one, other in zip(inputs, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad, **CLOSE)


@pytest.mark.parametrize("wanted", range(1, 8))
def test_only_wanted_gradients(wanted: int, device: torch.device) -> None:
    inputs = [draw(*shape, device=device) for shape in ((6, 5), (4, 5), (4,))]
    others = copies(inputs)
    for at, (one, other) in enumerate(zip(inputs, others, strict=True)):
        one.requires_grad_(bool(wanted >> at & 1))
        other.requires_grad_(bool(wanted >> at & 1))
    pcf.ops.linear_logsumexp(*inputs).sum().backward()
    chain(*others).sum().backward()
    for one, other in zip(inputs, others, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, **CLOSE)


@pytest.mark.parametrize("program", CHAINS, ids=str)
def test_the_function_passes_gradcheck(program: ProgramCase) -> None:
    cpu = torch.device("cpu")
    inputs = [draw(*s, device=cpu, dtype=torch.float64) for s in ((6, 5), (4, 5))]
    inputs += [operand.double() for operand in program.operands(6, 4)]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    encoded = encode(program.build(inputs[2:]))

    def call(x: Tensor, weight: Tensor, *operands: Tensor) -> Tensor:
        settings = (encoded.codes, encoded.constants, "default", None)
        return LinearLogSumExpFunction.apply(x, weight, None, None, *settings, *operands)

    assert torch.autograd.gradcheck(call, tuple(inputs))


def test_double_backward_is_refused(device: torch.device) -> None:
    x = draw(6, 5, device=device).requires_grad_()
    out = pcf.ops.linear_logsumexp(x, draw(4, 5, device=device))
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        grad.sum().backward()


def test_gradients_keep_their_own_memory(device: torch.device) -> None:
    x, weight = draw(6, 5, device=device), draw(4, 5, device=device)
    full, other = (draw(6, 4, device=device).requires_grad_() for _ in range(2))
    steps = (pcf.add(full), pcf.add(other))
    out = pcf.ops.linear_logsumexp(x, weight, epilogue=steps)
    first, second = torch.autograd.grad(out.sum(), (full, other))
    assert first.data_ptr() != second.data_ptr()
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first.sum(1), torch.ones_like(out), **CLOSE)


@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_same_exception_type_as_torch(case: InvalidCase, device: torch.device, monkeypatch) -> None:
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - the type is what is compared
        case.theirs(device)
    monkeypatch.setattr(pcf.ops, "linear", pcf.ops.linear_logsumexp)
    with pytest.raises(type(theirs.value)) as ours:
        case.ours(device)
    assert type(ours.value) is type(theirs.value)
    for word in case.words:
        assert word in str(ours.value)


def test_invalid_options(device: torch.device) -> None:
    x, weight = draw(6, 5, device=device), draw(4, 5, device=device)
    with pytest.raises(RuntimeError, match=r"operand 0 has shape .* output's \(6, 4\)"):
        pcf.ops.linear_logsumexp(x, weight, epilogue=(pcf.mul(draw(3, device=device)),))
    with pytest.raises(ValueError, match="ieee"):
        pcf.ops.linear_logsumexp(x, weight, precision="fp32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at most 16"):
        pcf.ops.linear_logsumexp(x, weight, epilogue=(pcf.relu(),) * 17)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_bias_of_another_dtype_raises_as_torch(dtype: torch.dtype, device: torch.device) -> None:
    layer = pcf.nn.LinearLogSumExp(3, 4, device=device)
    layer.bias.data = layer.bias.data.to(dtype)
    for call in (layer, layer.to_torch()):
        with pytest.raises(RuntimeError):
            call(torch.ones(2, 3, device=device))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = draw(6, 80, device=device, dtype=dtype), draw(4, 80, device=device, dtype=dtype)
    bias = draw(4, device=device, dtype=dtype)
    result = pcf.ops.linear_logsumexp(x, weight, bias, epilogue=(pcf.tanh(),))
    assert result.dtype == dtype
    exact = torch.logsumexp(torch.tanh(F.linear(x.double(), weight.double(), bias.double())), -1)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), exact, rtol=4 * rounding, atol=4 * rounding)


def test_float64_gradients_are_twice_differentiable() -> None:
    x = draw(3, 4, device=torch.device("cpu"), dtype=torch.float64).requires_grad_()
    layer = pcf.nn.LinearLogSumExp(4, 2, dtype=torch.float64, epilogue=(pcf.tanh(),))
    assert torch.autograd.gradgradcheck(layer, (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_as_torch(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = draw(6, 80, device=device), draw(4, 80, device=device).requires_grad_()
    with torch.autocast(device.type, dtype):
        result, expected = pcf.ops.linear_logsumexp(x, weight), chain(x, weight)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    assert weight.grad.dtype == torch.float32
    assert "autocast" in " ".join(pcf.counters()["fallback"])


def test_backward_under_autocast_stays_in_float32(device: torch.device) -> None:
    inputs = [draw(*shape, device=device).requires_grad_() for shape in ((6, 80), (4, 80))]
    others = copies(inputs)
    ours = pcf.ops.linear_logsumexp(*inputs)
    chain(*others).sum().backward()
    with torch.autocast(device.type, torch.bfloat16):
        ours.sum().backward()
    for one, other in zip(inputs, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad, **CLOSE)


def test_detours(device: torch.device) -> None:
    x, weight = draw(6, 5, device=device), draw(4, 5, device=device)
    expected = chain(x, weight)
    tagged = pcf.ops.linear_logsumexp(x.as_subclass(Tagged), weight)
    assert type(tagged) is Tagged
    mapped = torch.func.vmap(pcf.ops.linear_logsumexp, (0, None))(x, weight)
    torch.testing.assert_close(mapped, expected, **CLOSE)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        found = forward_ad.unpack_dual(pcf.ops.linear_logsumexp(dual, weight))
    torch.testing.assert_close(found.primal, expected, **CLOSE)
    assert found.tangent is not None
    reasons = " ".join(pcf.counters()["fallback"])
    assert all(word in reasons for word in ("Tagged", "torch.func", "forward-mode"))
    assert pcf.ops.linear_logsumexp(x.to("meta"), weight.to("meta")).shape == (6,)
    with torch.inference_mode():
        torch.testing.assert_close(pcf.ops.linear_logsumexp(x, weight), expected, **CLOSE)


def test_the_error_policy() -> None:
    pcf.set_fallback_policy("error")
    with pytest.raises(pcf.FallbackError, match="linear_logsumexp: cpu tensors"):
        pcf.ops.linear_logsumexp(torch.ones(2, 5), torch.ones(4, 5))


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (((3, 0), (4, 0)), "an empty problem"),
        (((0, 4), (4, 4)), "an empty problem"),
        (((3, 4), (0, 4)), "an empty problem"),
        (((3, 63), (4, 63)), "K=63"),
    ],
)
def test_what_is_handed_over(shapes, reason: str, cuda: torch.device) -> None:
    pcf.set_fallback_policy("error")
    x, weight = (draw(*shape, device=cuda) for shape in shapes)
    found = pcf.explain(pcf.ops.linear_logsumexp, x, weight, precision="ieee")
    assert found.path == "hand-over"
    assert reason in found.reason
    result = pcf.ops.linear_logsumexp(x, weight, precision="ieee")
    torch.testing.assert_close(result, chain(x, weight))
    (key,) = pcf.counters()["handover"]
    assert key.startswith("linear_logsumexp: ")


def test_explain(device: torch.device) -> None:
    x, weight = draw(6, 80, device=device), draw(4, 80, device=device)
    found = pcf.explain(pcf.ops.linear_logsumexp, x, weight, epilogue=(pcf.relu(),))
    assert found.operator == "linear_logsumexp"
    assert found.program == "relu | logsumexp"
    assert found.path == ("fused" if x.is_cuda else "fallback"), str(found)
    layer = pcf.nn.LinearLogSumExp(80, 4, device=device, epilogue=(pcf.relu(),))
    assert pcf.explain(layer, x).program == "add(operand 0) | relu | logsumexp"
    layer.epilogue.get_submodule("0").register_forward_hook(lambda *_: None)
    assert pcf.explain(layer, x).reason == "hooks on a step"
    with pytest.raises(RuntimeError, match="features"):
        pcf.explain(pcf.ops.linear_logsumexp, x, weight[:, :5])


def operator_sample(shape: tuple[int, ...], device: torch.device) -> tuple:
    operands = [draw(4, device=device), draw(*shape[:-1], 4, device=device)]
    program = encode((*map(pcf.mul, operands), pcf.gelu()))
    head = (draw(*shape, device=device), draw(4, 5, device=device))
    return head, (program.codes, program.constants, operands, "default")


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5)], ids=str)
def test_operators(shape: tuple[int, ...], device: torch.device) -> None:
    head, tail = operator_sample(shape, device)
    names = torch.ops.pycutfuse
    torch.library.opcheck(names.linear_logsumexp.default, (*head, None, None, *tail))
    for needs in ((True,) * 4, (False, True, False, True)):
        arguments = (draw(*shape[:-1], device=device), *head, *tail, needs)
        torch.library.opcheck(names.linear_logsumexp_backward.default, arguments)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_fullgraph_and_dynamic(backend: str, device: torch.device) -> None:
    torch._dynamo.reset()
    layer = pcf.nn.LinearLogSumExp(8, 6, device=device, epilogue=(pcf.mul(2.0), pcf.silu()))
    twin = layer.to_torch()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for rows in (16, 19, 5):
        x = draw(2, rows, 8, device=device).requires_grad_()
        y = x.detach().clone().requires_grad_()
        result, expected = compiled(x), twin(y)
        torch.testing.assert_close(result, expected, **CLOSE)
        one = torch.autograd.grad(result.square().sum(), [x, layer.weight, layer.bias])
        other = torch.autograd.grad(expected.square().sum(), [y, layer.weight, layer.bias])
        for ours, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_the_gradient_of_one_large_logit_is_whole(device: torch.device) -> None:
    # Whatever forward's last bits were: the backward contracts the logits again.
    x = (1000 * torch.randn(50, 70, device=device)).requires_grad_()
    weight = torch.randn(1, 70, device=device)
    pcf.ops.linear_logsumexp(x, weight, precision="ieee").sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.expand(50, 70), rtol=1e-6, atol=0.0)
