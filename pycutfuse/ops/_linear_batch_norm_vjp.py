"""Vector-Jacobian product of Linear -> program -> batch norm -> program."""

from typing import Any

import torch
from torch import Tensor

from pycutfuse import reference
from pycutfuse.ops import _vjp
from pycutfuse.ops._contraction import contract


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    codes: list[int],
    constants: list[float],
    operands: list[Tensor],
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    save: Tensor,
    training: bool,
    eps: float,
    after_codes: list[int],
    after_constants: list[float],
    after_operands: list[Tensor],
    precision: str,
    needs: list[bool],
) -> list[Tensor]:
    """Gradients of (x, weight, bn_weight, bn_bias, operands, after_operands) that `needs` wants.

    z is contracted again from the saved inputs; `save` (2, N) holds mean and 1 / std that forward
    normalised with, and the running statistics are not touched. Statistics of the batch are taken
    of the new z: where all rows are equal, the last bit of another z would be all there is.
    """
    inner, outer = needs[4 : 4 + len(operands)], needs[4 + len(operands) :]
    # By the layout torch picks its kernel, and they round apart: a compiled backward gets it so.
    grad = grad.contiguous()
    with _vjp.without_autocast(x):
        value = contract(x, weight, precision)
        z = reference.apply_program(value, codes, constants, operands)
        mean, invstd = save.unbind(0)
        if training and z.is_cuda and z.numel() > 0:
            mean, invstd = torch.batch_norm_stats(z, eps)
        y = None
        if reference.reads_value(after_codes, outer):
            y = (z - mean) * (invstd if bn_weight is None else invstd * bn_weight)
            y = (y if bn_bias is None else y + bn_bias).to(z.dtype)
        of_y, of_after = reference.program_vjp(
            after_codes, after_constants, after_operands, y, grad, outer
        )
        of_z, of_bn_weight, of_bn_bias = _batch_norm_vjp(
            of_y, z, bn_weight, mean, invstd, training, eps, (needs[2], needs[3])
        )
        of_value, of_operands = reference.program_vjp(
            codes, constants, operands, value, of_z, inner
        )
        of_value = of_value.to(x.dtype)
        of_x, of_weight = _vjp.linear_vjp(x, weight, of_value, needs[0], needs[1], precision)
        inputs = [t for t in (grad, x, weight, bn_weight, bn_bias, save) if t is not None]
        return _vjp.own_memory(
            (
                of_x,
                of_weight,
                _as(of_bn_weight, bn_weight),
                _as(of_bn_bias, bn_bias),
                *of_operands,
                *of_after,
            ),
            (*inputs, *operands, *after_operands),
        )


def _batch_norm_vjp(
    grad: Tensor,
    z: Tensor,
    bn_weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    training: bool,
    eps: float,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    found: tuple[Tensor, Tensor, Tensor]
    if training and z.numel() > 0:
        aten: Any = torch.ops.aten
        given = [grad, z, bn_weight]
        if not z.is_cuda:  # whose kernel wants all of them and the saved ones in one dtype
            given = [None if one is None else one.to(mean.dtype) for one in given]
        numbers = (None, None, mean, invstd, True, eps, (True, *needs))
        found = aten.native_batch_norm_backward(*given, *numbers)
    else:
        # The statistics are constants; without rows nothing depends on them either.
        of_z = grad * (invstd if bn_weight is None else invstd * bn_weight)
        found = (of_z, (grad * (z - mean) * invstd).sum(0), grad.sum(0))
    of_z, of_weight, of_bias = found
    return of_z.to(z.dtype), of_weight if needs[0] else None, of_bias if needs[1] else None


def _as(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
    return grad if grad is None or like is None else grad.to(like.dtype)
