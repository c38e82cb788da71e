"""Planned calls of `linear_batch_norm`: launched, and recorded where a gradient is asked for."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pycutfuse import config
from pycutfuse.ops import _gate, _launch, _vjp
from pycutfuse.ops import _linear_batch_norm_raw as raw
from pycutfuse.program import Encoded

_once: Callable[[Any], Any] = once_differentiable  # untyped


def running_save(mean: Any, var: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a backward in evaluation needs: a later forward in training changes both in place."""
    return torch.stack((mean, var)).to(dtype)


def gradients(
    grad: Tensor, saved: Sequence[Any], settings: Sequence[Any], needs: list[bool]
) -> list[Tensor | None]:
    """Of x, weight, bn_weight, bn_bias and the operands.

    `saved` are these with mean and 1 / std of the batch, or `running_save`, before the operands;
    `settings` are training, eps, codes and constants of both programs, how many of the operands are
    the first one's, and the precision.
    """
    x, weight, bn_weight, bn_bias, save, *operands = saved
    training, eps, program, after, count, precision = settings
    if not training:
        mean, var = save.unbind(0)
        save = torch.stack((mean, torch.rsqrt(var + eps)))
    grads = raw.backward(
        grad,
        x,
        weight,
        *program,
        operands[:count],
        bn_weight,
        bn_bias,
        save,
        training,
        eps,
        *after,
        operands[count:],
        precision,
        needs,
    )
    return _vjp.restore(grads, needs)


class PlannedFunction(torch.autograd.Function):
    """As `LinearBatchNormFunction` for a planned call: what differentiates nothing stays in it."""

    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[Any, ...],
        x: Tensor,
        weight: Tensor,
        bn_weight: Tensor | None,
        bn_bias: Tensor | None,
        *operands: Tensor,
    ) -> Tensor:
        recipe, tensors, words, momentum, eps, running, ctx.settings = call
        save = raw.new_save(recipe, True) if running is None else running_save(*running)
        out = _launch.launch(recipe, tensors, words, momentum, eps, save)
        ctx.save_for_backward(x, weight, bn_weight, bn_bias, save, *operands)
        return out

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        training, eps, program, after, count, precision = ctx.settings
        programs = (program.codes, program.constants), (after.codes, after.constants)
        settings = (training, eps, *programs, count, precision)
        needs = list(ctx.needs_input_grad[1:])
        return None, *gradients(grad, ctx.saved_tensors, settings, needs)


_apply = _gate.plain_apply(PlannedFunction)
_grad_enabled = torch.is_grad_enabled


def start(
    find: Callable[..., _launch.Recipe | None],
    x: Tensor,
    weight: Tensor,
    planes: Tensor | None,
    words: Tensor | None,
    program: Encoded,
    operands: Sequence[Tensor],
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    after: Encoded,
    after_operands: Sequence[Tensor],
    precision: str,
) -> Tensor | None:
    """Launch the call if `find`, for example `Memo.hit`, finds its recipe, else None.

    The arguments are those of `Call`, one by one: a `Call` costs more than the rest of this.
    Nothing is active that must see the call: `_gate.is_plain_eager`.
    """
    norm = (bn_weight, bn_bias, running_mean, running_var, num_batches_tracked)
    tensors = [x, weight, planes, *operands, *norm, *after_operands]
    tier = config.resolve_tier(precision)
    recipe = find(tensors, program, tier, raw.TAILS[training], after)
    if recipe is None:
        return None
    if not _grad_enabled() or not (
        weight.requires_grad
        or x.requires_grad
        or _gate.any_requires_grad(x, weight, (*operands, *norm[:4], *after_operands))
    ):
        return _launch.launch(recipe, tensors, words, momentum, eps)
    running = None if training else (running_mean, running_var)
    settings = training, eps, program, after, len(operands), precision
    call = recipe, tensors, words, momentum, eps, running, settings
    recorded: Tensor = _apply(call, x, weight, bn_weight, bn_bias, *operands, *after_operands)
    return recorded
