"""The raw operators behind `conv2d_batch_norm`: schemas, kernels, fake kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pycutfuse import _library, config, reference
from pycutfuse.geometry import memory_format
from pycutfuse.ops import _conv_batch_norm_vjp, _conv_call, _conv_launch, _conv_raw, _vjp
from pycutfuse.ops._conv_call import BATCH_NORM, HAND_OVER, Call, Norm
from pycutfuse.ops._conv_launch import ConvRecipe
from pycutfuse.ops._launch import report
from pycutfuse.program import Encoded

_torch: Any = torch


def norm_of(call: Call) -> Norm:
    """The batch norm of a call of this operator."""
    assert call.norm is not None
    return call.norm


def flat(call: Call) -> tuple[Any, ...]:
    """In the order of the schema."""
    norm, program = norm_of(call), call.program
    head = (*call[:4], *call.geometry, program.codes, program.constants, call.operands)
    after = (norm.after.codes, norm.after.constants, norm.operands)
    return (*head, *norm[:8], *after, call.precision)


def of_flat(arguments: Sequence[Any]) -> Call:
    """`flat` undone."""
    after = Encoded(tuple(arguments[21]), tuple(arguments[22]))
    norm = Norm._make((*arguments[13:21], after, arguments[23]))
    return _conv_raw.of_flat((*arguments[:13], arguments[24]))._replace(norm=norm)


def _moments(dtype: torch.dtype) -> torch.dtype:
    """In which mean and 1 / std of values of `dtype` are saved."""
    return torch.promote_types(dtype, torch.float32)


def _by_torch(call: Call) -> tuple[Tensor, Tensor]:
    norm = norm_of(call)
    z = _conv_raw.by_torch(call._replace(norm=None))
    factor = reference.update_factor(norm.num_batches_tracked, norm.momentum, norm.training)
    features = z.shape[1] if norm.training else 0
    save = z.new_zeros((2, features), dtype=_moments(z.dtype))
    if z.numel() == 0:
        y = z.clone()
    else:
        # What F.batch_norm calls, with the moments that it saves for its backward.
        numbers = (norm.training, factor, norm.eps, torch.backends.cudnn.enabled)
        y, mean, invstd, *_ = _torch._batch_norm_impl_index(z, *norm[:4], *numbers)
        if norm.training:
            save[0], save[1] = mean, invstd
    y = reference.apply_program(y, norm.after.codes, norm.after.constants, norm.operands)
    return y.contiguous(memory_format=memory_format(call.x, call.weight, call.geometry)), save


def _forward_cpu(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = of_flat(arguments)
    _conv_call.check_dtypes(call)
    _conv_call.check(call)
    config.report_fallback(BATCH_NORM, "cpu tensors")
    return _by_torch(call)


def new_save(recipe: ConvRecipe, training: bool) -> Tensor:
    """Memory for the batch's mean and 1 / std; empty in evaluation."""
    features = recipe.problem.out_channels if training else 0
    return torch.empty(2, features, dtype=torch.float32, device=recipe.device)


def _forward_cuda(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = of_flat(arguments)
    tier = config.resolve_conv_tier(call.precision)
    if tier != "torch":
        found = _conv_launch.lookup(call, tier)
        if isinstance(found, ConvRecipe):
            save = new_save(found, norm_of(call).training)
            return _conv_launch.launch(found, call, save), save
        report(BATCH_NORM, found)
    else:
        _conv_call.check_dtypes(call)
        _conv_call.check(call)
        config.count_handover(BATCH_NORM, HAND_OVER)
    return _by_torch(call)


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = of_flat(arguments)
    norm, inner = norm_of(call), _vjp.promoted(call.x.dtype, call.operands)
    out = _conv_raw.fake_out(call, _vjp.promoted(inner, norm.operands))
    saved = (2, out.shape[1] if norm.training else 0)
    return out, call.x.new_empty(saved, dtype=_moments(inner))


def _of_backward(
    arguments: Sequence[Any],
) -> tuple[Tensor, Call, Tensor, list[bool]]:
    grad, head, rest = arguments[0], arguments[1:13], arguments[13:]
    bn_weight, bn_bias, save, training, eps, codes, constants, operands, precision, needs = rest
    after = Encoded(tuple(codes), tuple(constants))
    norm = Norm(bn_weight, bn_bias, None, None, None, training, 0.0, eps, after, operands)
    given = (*head[:3], None, *head[3:], precision)
    return grad, _conv_raw.of_flat(given)._replace(norm=norm), save, needs


def _backward(*arguments: Any) -> list[Tensor]:
    return _conv_batch_norm_vjp.backward(*_of_backward(arguments))


def _backward_fake(*arguments: Any) -> list[Tensor]:
    _, call, _, needs = _of_backward(arguments)
    norm = norm_of(call)
    others = (call.bias, norm.weight, norm.bias, *call.operands, *norm.operands)
    return _conv_raw.fake_grads(call, others, needs)


forward = _library.define(
    "convolution_batch_norm",
    f"(Tensor x, Tensor weight, Tensor? bias, Tensor? snapshot, {_conv_raw.GEOMETRY}, int[] codes, "
    "float[] constants, Tensor[] operands, Tensor? bn_weight, Tensor? bn_bias, "
    "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, "
    "bool training, float momentum, float eps, int[] after_codes, float[] after_constants, "
    "Tensor[] after_operands, str precision) -> (Tensor out, Tensor save)",
    cpu=_forward_cpu,
    cuda=_forward_cuda,
    fake=_forward_fake,
)
backward = _library.define_backward(
    "convolution_batch_norm_backward",
    f"(Tensor grad, Tensor x, Tensor weight, Tensor? bias, {_conv_raw.GEOMETRY}, int[] codes, "
    "float[] constants, Tensor[] operands, Tensor? bn_weight, Tensor? bn_bias, Tensor save, "
    "bool training, float eps, int[] after_codes, float[] after_constants, "
    "Tensor[] after_operands, str precision, bool[] needs) -> Tensor[]",
    cpu=_backward,
    cuda=_backward,
    fake=_backward_fake,
)
