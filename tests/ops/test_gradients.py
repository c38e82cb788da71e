"""Gradients are those of the torch chain, and running statistics are updated once."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse.ops._linear import LinearFunction
from pycutfuse.ops._linear_batch_norm import LinearBatchNormFunction
from pycutfuse.program import encode

from ..cases.programs import CHAINS, PROGRAMS, ProgramCase

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def leaves(*shapes: tuple[int, ...], device: torch.device, dtype=torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    return [tensor.to(device).requires_grad_() for tensor in drawn]


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5), (5,)], ids=str)
def test_linear_gradients(program: ProgramCase, shape, device: torch.device) -> None:
    inputs = leaves(shape, (4, 5), (4,), device=device)
    m = 6 if len(shape) > 1 else 1
    if "mn" in program.shapes or "m" in program.shapes:
        shape, inputs = (6, 5), leaves((6, 5), (4, 5), (4,), device=device)
        m = 6
    inputs += [o.requires_grad_() for o in program.operands(m, 4, device=str(device))]
    others = copies(inputs)
    ours = pcf.ops.linear(*inputs[:3], epilogue=program.build(inputs[3:]))
    theirs = program.plain(F.linear(*others[:3]), others[3:])
    grad = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1)).to(device)
    ours.backward(grad)
    theirs.backward(grad)
    for one, other in zip(inputs, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad, **CLOSE)


@pytest.mark.parametrize("wanted", range(1, 16))
def test_only_wanted_gradients(wanted: int, device: torch.device) -> None:
    inputs = leaves((6, 5), (4, 5), (4,), (6, 4), device=device)
    others = copies(inputs)
    for at, (one, other) in enumerate(zip(inputs, others, strict=True)):
        one.requires_grad_(bool(wanted >> at & 1))
        other.requires_grad_(bool(wanted >> at & 1))
    steps = (pcf.mul(inputs[3]), pcf.add(inputs[3]))
    pcf.ops.linear(*inputs[:3], epilogue=steps).sum().backward()
    (F.linear(*others[:3]) * others[3] + others[3]).sum().backward()
    for one, other in zip(inputs, others, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, **CLOSE)


@pytest.mark.parametrize("program", CHAINS, ids=str)
def test_linear_function_passes_gradcheck(program: ProgramCase) -> None:
    inputs = leaves((6, 5), (4, 5), device=torch.device("cpu"), dtype=torch.float64)
    operands = [o.double().requires_grad_() for o in program.operands(6, 4)]
    encoded = encode(program.build(operands))

    def call(x: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
        return LinearFunction.apply(
            x, weight, None, None, encoded.codes, encoded.constants, "default", None, *others
        )

    assert torch.autograd.gradcheck(call, (*inputs, *operands))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("after", [(), (pcf.tanh(),)], ids=["bare", "after"])
def test_batch_norm_function_passes_gradcheck(training: bool, after) -> None:
    device = torch.device("cpu")
    inputs = leaves((6, 5), (4, 5), (4,), (4,), (4,), device=device, dtype=torch.float64)
    mean, var = torch.zeros(4).double(), torch.full((4,), 2.0).double()
    inner, outer = encode((pcf.mul(inputs[4]), pcf.sigmoid())), encode(after)

    def call(x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, scale: Tensor) -> Tensor:
        stats = (None, None, None) if training else (mean, var, None)
        return LinearBatchNormFunction.apply(
            *(x, weight, None, None, gamma, beta, *stats, training, 0.1, 1e-5),
            *((inner.codes, inner.constants), (outer.codes, outer.constants), 1),
            *("default", scale),
        )

    assert torch.autograd.gradcheck(call, tuple(inputs))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("program", [CHAINS[0], CHAINS[1]], ids=str)
def test_batch_norm_gradients(
    training: bool, affine: bool, program: ProgramCase, device: torch.device
) -> None:
    inputs = leaves((16, 5), (4, 5), (4,), (4,), device=device)
    inputs += [o.requires_grad_() for o in program.operands(16, 4, device=str(device))]
    if affine:
        inputs += leaves((4,), (4,), device=device)
    others = copies(inputs)
    stats = [torch.zeros(4, device=device), torch.ones(4, device=device)]
    twins = [tensor.clone() for tensor in stats]
    count = torch.tensor(0, device=device)
    gamma, beta = inputs[-2:] if affine else (None, None)
    last = len(inputs) - (2 if affine else 0)
    ours = pcf.ops.linear_batch_norm(
        *inputs[:3],
        epilogue=(pcf.mul(inputs[3]),),
        running_mean=stats[0],
        running_var=stats[1],
        num_batches_tracked=count,
        bn_weight=gamma,
        bn_bias=beta,
        training=training,
        after=program.build(inputs[4:last]),
    )
    twin_gamma, twin_beta = others[-2:] if affine else (None, None)
    z = F.linear(*others[:3]) * others[3]
    y = F.batch_norm(z, *twins, twin_gamma, twin_beta, training)
    theirs = program.plain(y, others[4:last])
    grad = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).to(device)
    ours.backward(grad)
    theirs.backward(grad)
    for one, other in zip(inputs, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad, **CLOSE)
    for one, other in zip(stats, twins, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    assert int(count) == int(training)


def test_running_statistics_may_change_before_backward(device: torch.device) -> None:
    x, weight = leaves((6, 5), (4, 5), device=device)
    mean, var = torch.zeros(4, device=device), torch.ones(4, device=device)
    given = {"running_mean": mean, "running_var": var}
    evaluated = pcf.ops.linear_batch_norm(x, weight, eps=0.0, **given)
    pcf.ops.linear_batch_norm(x, weight, training=True, **given)
    evaluated.sum().backward()
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand_as(x), **CLOSE)


def test_double_backward_is_refused(device: torch.device) -> None:
    x, weight = leaves((6, 5), (4, 5), device=device)
    loss = pcf.ops.linear(x, weight, epilogue=(pcf.tanh(),)).square().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        grad.sum().backward()


def test_backward_under_autocast_stays_in_float32(device: torch.device) -> None:
    x, weight = leaves((6, 5), (4, 5), device=device)
    twins = copies([x, weight])
    ours = pcf.ops.linear(x, weight, epilogue=(pcf.tanh(),)).sum()
    theirs = torch.tanh(F.linear(*twins)).sum()
    theirs.backward()
    with torch.autocast(device.type, torch.bfloat16):
        ours.backward()
    torch.testing.assert_close(x.grad, twins[0].grad, **CLOSE)


def test_gradients_keep_their_own_memory(device: torch.device) -> None:
    x, weight = leaves((6, 4), (4, 4), device=device)
    full, other = leaves((6, 4), (6, 4), device=device)
    out = pcf.ops.linear(x, weight, epilogue=(pcf.add(full), pcf.add(other)))
    grad = torch.ones_like(out)
    first, second = torch.autograd.grad(out, (full, other), grad)
    addresses = {tensor.data_ptr() for tensor in (grad, first, second)}
    assert len(addresses) == 3


BOUNDED = {
    "hardtanh": (pcf.hardtanh(-2.0, 3.0), lambda v: F.hardtanh(v, -2.0, 3.0)),
    "clamp": (pcf.clamp(-2.0, 3.0), lambda v: v.clamp(-2.0, 3.0)),
    "min": (pcf.clamp(min=-2.0), lambda v: v.clamp(min=-2.0)),
    "max": (pcf.clamp(max=3.0), lambda v: v.clamp(max=3.0)),
    "minimum": (pcf.minimum(3.0), lambda v: v.clamp(max=3.0)),
    "maximum": (pcf.maximum(-2.0), lambda v: v.clamp(min=-2.0)),
    "infinite": (pcf.clamp(-2.0, math.inf), lambda v: v.clamp(-2.0, math.inf)),
    "reversed": (pcf.clamp(3.0, -2.0), lambda v: v.clamp(3.0, -2.0)),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_gradients_at_bounds(name: str, device: torch.device) -> None:
    step, plain = BOUNDED[name]
    values = [-math.inf, -3.0, -2.0, 0.0, 3.0, 4.0, math.inf, math.nan]
    x = torch.tensor(values, device=device).unsqueeze(1).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    pcf.ops.linear(x, torch.ones(1, 1, device=device), epilogue=(step,)).sum().backward()
    plain(twin).sum().backward()
    assert torch.equal(x.grad, twin.grad)


@pytest.mark.parametrize("tail", ["linear", "norm"])
@pytest.mark.parametrize("shape", [(3, 0), (0, 0), (0, 4)], ids=str)
def test_gradients_of_empty_inputs(tail: str, shape, device: torch.device) -> None:
    x, weight, bias = leaves(shape, (2, shape[1]), (2,), device=device)
    twins = copies([x, weight, bias])
    if tail == "linear":
        ours, theirs = pcf.ops.linear(x, weight, bias), F.linear(*twins)
    else:
        stats = [torch.zeros(2, device=device), torch.ones(2, device=device)]
        ours = pcf.ops.linear_batch_norm(
            x, weight, bias, running_mean=stats[0], running_var=stats[1], eps=0.25
        )
        theirs = F.batch_norm(F.linear(*twins), *stats, eps=0.25)
    ours.sum().backward()
    theirs.sum().backward()
    for one, twin in zip((x, weight, bias), twins, strict=True):
        assert torch.equal(one.grad, twin.grad)


@pytest.mark.parametrize(
    ("steps", "reads"), [((), False), ((pcf.mul(2.0), pcf.add(1.0)), False), ((pcf.relu(),), True)]
)
def test_an_input_that_no_gradient_reads_is_not_kept(steps, reads: bool, device) -> None:
    """As of layers whose weight is frozen while others learn."""
    x, weight, bias = leaves((64, 5), (4, 5), (4,), device=device)
    weight.requires_grad_(False)
    kept = set()

    def pack(tensor: Tensor) -> Tensor:
        kept.add((tuple(tensor.shape), tensor.untyped_storage().nbytes() // tensor.itemsize))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = pcf.ops.linear(x, weight, bias, epilogue=steps)
    result.sum().backward()
    assert ((64, 5), 320) in kept if reads else ((64, 5), 1) in kept
    assert x.grad is not None
    assert bias.grad is not None
