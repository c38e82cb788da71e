"""The raw operators of a convolution with a program: schemas, kernels, fake kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pycutfuse import _library, config, reference
from pycutfuse.geometry import Geometry, memory_format
from pycutfuse.ops import _conv_call, _conv_launch, _vjp
from pycutfuse.ops._conv_call import HAND_OVER, Call
from pycutfuse.ops._convolution import convolution_vjp, convolve, torch_convolution
from pycutfuse.ops._launch import report
from pycutfuse.program import Encoded

# Of both raw operators; `Geometry` in its own order.
GEOMETRY = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt[] output_padding, SymInt groups, "
    "bool transposed"
)


def of_flat(arguments: Sequence[Any]) -> Call:
    """`flat` undone."""
    program = Encoded(tuple(arguments[10]), tuple(arguments[11]))
    geometry = geometry_of(arguments[4:10])
    return Call._make((*arguments[:4], geometry, program, arguments[12], arguments[13], None))


def geometry_of(arguments: Sequence[Any]) -> Geometry:
    """What crossed the dispatcher, as it was before."""
    lists: list[Any] = [tuple(one) for one in arguments[:4]]
    return Geometry(*lists, *arguments[4:])


def flat(call: Call) -> tuple[Any, ...]:
    """In the order of the schema."""
    program = (call.program.codes, call.program.constants, call.operands)
    return (*call[:4], *call.geometry, *program, call.precision)


def batched(tensor: Tensor) -> Tensor:
    """(N, C, H, W) of it or of (C, H, W)."""
    return tensor if tensor.dim() == 4 else tensor.unsqueeze(0)


def in_format(tensor: Tensor, dims: int, layout: torch.memory_format) -> Tensor:
    """(N, C, H, W) in memory format `layout`, or for 3 `dims` the one image of it."""
    tensor = tensor.contiguous(memory_format=layout)
    return tensor if dims == 4 else tensor.squeeze(0)


def by_torch(call: Call) -> Tensor:
    """program(conv(x, weight) + bias) by torch at the call's tier, in torch's memory format."""
    x, weight, bias = call[:3]
    value = torch_convolution(batched(x), weight, bias, call.geometry, call.precision)
    value = value if x.dim() == 4 else value.squeeze(0)
    program = call.program
    value = reference.apply_program(value, program.codes, program.constants, call.operands)
    return in_format(batched(value), x.dim(), memory_format(x, weight, call.geometry))


def _forward_cpu(*arguments: Any) -> Tensor:
    call = of_flat(arguments)
    _conv_call.check_dtypes(call)
    _conv_call.check(call)
    config.report_fallback(_conv_call.operator_name(call), "cpu tensors")
    return by_torch(call)


def _forward_cuda(*arguments: Any) -> Tensor:
    call = of_flat(arguments)
    tier = config.resolve_conv_tier(call.precision)
    if tier != "torch":
        found = _conv_launch.lookup(call, tier)
        if isinstance(found, _conv_launch.ConvRecipe):
            return _conv_launch.launch(found, call)
        report(_conv_call.operator_name(call), found)
    else:
        _conv_call.check_dtypes(call)
        _conv_call.check(call)
        config.count_handover(_conv_call.operator_name(call), HAND_OVER)
    return by_torch(call)


def fake_out(call: Call, dtype: torch.dtype) -> Tensor:
    """A result without data."""
    x = call.x
    made = x.new_empty(_conv_call.check(call), dtype=dtype)
    return in_format(batched(made), x.dim(), memory_format(x, call.weight, call.geometry))


def _forward_fake(*arguments: Any) -> Tensor:
    call = of_flat(arguments)
    return fake_out(call, _vjp.promoted(call.x.dtype, call.operands))


def own_grads(
    grads: Sequence[Tensor | None], call: Call, others: Sequence[Tensor | None]
) -> list[Tensor]:
    """Gradients of x, weight and the rest, each in its own memory; x's and weight's in torch's."""
    layout, dims = memory_format(call.x, call.weight, call.geometry), (call.x.dim(), 4)
    pairs = zip(grads[:2], dims, strict=True)
    made = [in_format(grad, size, layout) for grad, size in pairs if grad is not None]
    inputs = [one for one in (call.x, call.weight, *others, *made) if one is not None]
    return [*made, *_vjp.own_memory(grads[2:], inputs)]


def fake_grads(call: Call, others: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor]:
    """What `own_grads` returns, without data."""
    layout, dims = memory_format(call.x, call.weight, call.geometry), call.x.dim()
    made = []
    if needs[0]:
        made.append(in_format(batched(call.x.new_empty(call.x.shape)), dims, layout))
    if needs[1]:
        made.append(in_format(call.weight.new_empty(call.weight.shape), 4, layout))
    rest = [call.weight if one is None else one for one in others]
    return [*made, *_vjp.fake_grads(rest, needs[2:])]


def _of_backward(arguments: Sequence[Any]) -> tuple[Tensor, Call, list[bool]]:
    grad, x, weight, bias, *rest, needs = arguments
    return grad, of_flat((x, weight, bias, None, *rest)), needs


def _backward(*arguments: Any) -> list[Tensor]:
    grad, call, needs = _of_backward(arguments)
    x, weight, bias, _, geometry, program, operands, precision, _ = call
    codes, constants, own = program.codes, program.constants, needs[3:]
    with _vjp.without_autocast(x):
        value = None
        if reference.reads_value(codes, own):
            value = convolve(batched(x), weight, bias, geometry, precision).reshape(grad.shape)
        of_value, of_operands = reference.program_vjp(codes, constants, operands, value, grad, own)
        of_value = batched(of_value.to(x.dtype))
        wanted = (needs[0], needs[1], needs[2])
        found = convolution_vjp(of_value, batched(x), weight, geometry, wanted, precision)
        return own_grads((*found, *of_operands), call, (grad, bias, *operands))


def _backward_fake(*arguments: Any) -> list[Tensor]:
    _, call, needs = _of_backward(arguments)
    return fake_grads(call, (call.bias, *call.operands), needs)


forward = _library.define(
    "convolution_fused",
    f"(Tensor x, Tensor weight, Tensor? bias, Tensor? snapshot, {GEOMETRY}, int[] codes, "
    "float[] constants, Tensor[] operands, str precision) -> Tensor",
    cpu=_forward_cpu,
    cuda=_forward_cuda,
    fake=_forward_fake,
)
backward = _library.define_backward(
    "convolution_fused_backward",
    f"(Tensor grad, Tensor x, Tensor weight, Tensor? bias, {GEOMETRY}, int[] codes, "
    "float[] constants, Tensor[] operands, str precision, bool[] needs) -> Tensor[]",
    cpu=_backward,
    cuda=_backward,
    fake=_backward_fake,
)
