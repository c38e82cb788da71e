"""Vector-Jacobian product of convolution -> program -> batch norm -> program."""

from typing import Any

import torch
from torch import Tensor

from pycutfuse import reference
from pycutfuse.geometry import memory_format
from pycutfuse.ops import _conv_raw, _vjp
from pycutfuse.ops._conv_call import Call, Norm
from pycutfuse.ops._convolution import convolution_vjp, convolve_again


def backward(grad: Tensor, call: Call, save: Tensor, needs: list[bool]) -> list[Tensor]:
    """Gradients of (x, weight, bias, bn_weight, bn_bias, operands, after_operands) wanted.

    z is convolved again from the saved inputs, by the policy of forward; `save` (2, K) holds mean
    and 1 / std that forward normalised with, and the running statistics are not touched.
    """
    norm, program = call.norm, call.program
    assert norm is not None
    x, weight, bias, _, geometry = call[:5]
    count = 5 + len(call.operands)
    inner, outer = needs[5:count], needs[count:]
    # By the layout torch picks its kernel, and they round apart: a compiled backward gets it so.
    grad = grad.contiguous(memory_format=memory_format(x, weight, geometry))
    with _vjp.without_autocast(x):
        value = convolve_again(_with_statistics(call, norm, save))
        head = (program.codes, program.constants, call.operands)
        z = reference.apply_program(value, *head)
        y = None
        if reference.reads_value(norm.after.codes, outer):
            y = _normalised(z, norm, save)
        after = (norm.after.codes, norm.after.constants, norm.operands)
        of_y, of_after = reference.program_vjp(*after, y, grad, outer)
        of_z, of_bn_weight, of_bn_bias = _batch_norm_vjp(of_y, z, norm, save, (needs[3], needs[4]))
        of_value, of_operands = reference.program_vjp(*head, value, of_z, inner)
        wanted = (needs[0], needs[1], needs[2])
        given = (of_value.to(x.dtype), x, weight, geometry, wanted, call.precision)
        affine = (_as(of_bn_weight, norm.weight), _as(of_bn_bias, norm.bias))
        others = (grad, bias, norm.weight, norm.bias, save, *call.operands, *norm.operands)
        found = (*convolution_vjp(*given), *affine, *of_operands, *of_after)
        return _conv_raw.own_grads(found, call, others)


def _with_statistics(call: Call, norm: Norm, save: Tensor) -> Call:
    """`call` as valid as its forward's was: running statistics are not saved, any will do."""
    if norm.training:
        return call
    mean, invstd = save.unbind(0)
    return call._replace(norm=norm._replace(running_mean=mean, running_var=invstd))


def _of_channels(vector: Tensor) -> Tensor:
    return vector[:, None, None]


def _normalised(z: Tensor, norm: Norm, save: Tensor) -> Tensor:
    mean, invstd = save.unbind(0)
    scale = invstd if norm.weight is None else invstd * norm.weight
    y = (z - _of_channels(mean)) * _of_channels(scale)
    return (y if norm.bias is None else y + _of_channels(norm.bias)).to(z.dtype)


def _batch_norm_vjp(
    grad: Tensor, z: Tensor, norm: Norm, save: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    mean, invstd = save.unbind(0)
    found: tuple[Tensor, Tensor, Tensor]
    if norm.training and z.numel() > 0:
        aten: Any = torch.ops.aten
        given = [grad, z, norm.weight]
        if not z.is_cuda:  # whose kernel wants all of them and the saved ones in one dtype
            given = [None if one is None else one.to(save.dtype) for one in given]
        numbers = (None, None, mean, invstd, True, norm.eps, (True, *needs))
        found = aten.native_batch_norm_backward(*given, *numbers)
    else:
        # The statistics are constants; without images nothing depends on them either.
        scale = invstd if norm.weight is None else invstd * norm.weight
        centred = (z - _of_channels(mean)) * _of_channels(invstd)
        sums = (grad * centred).sum((0, 2, 3)), grad.sum((0, 2, 3))
        found = (grad * _of_channels(scale), *sums)
    of_z, of_weight, of_bias = found
    return of_z.to(z.dtype), of_weight if needs[0] else None, of_bias if needs[1] else None


def _as(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
    return grad if grad is None or like is None else grad.to(like.dtype)
