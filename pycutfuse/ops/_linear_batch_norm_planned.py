"""Planned calls of `linear_batch_norm`: launched, and recorded where a gradient is asked for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pycutfuse import config
from pycutfuse.ops import _gate, _launch, _memo, _replay, _vjp
from pycutfuse.ops import _linear_batch_norm_raw as raw


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
    """As `LinearBatchNormFunction` for a call that was launched before it is recorded."""

    @staticmethod
    def forward(
        ctx: Any,
        made: list[Tensor],
        settings: tuple[Any, ...],
        x: Tensor,
        weight: Tensor,
        bn_weight: Tensor | None,
        bn_bias: Tensor | None,
        *operands: Tensor,
    ) -> Tensor:
        out, save = made
        ctx.settings = settings
        ctx.save_for_backward(x, weight, bn_weight, bn_bias, save, *operands)
        return out

    @staticmethod
    @_vjp.once_differentiable
    def backward(ctx: Any, saved: Sequence[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
        training, eps, program, after, count, precision = ctx.settings
        programs = (program.codes, program.constants), (after.codes, after.constants)
        settings = (training, eps, *programs, count, precision)
        needs = list(ctx.needs_input_grad[2:])
        return None, None, *gradients(grad, saved, settings, needs)


_apply = _gate.plain_apply(PlannedFunction)


def _settings(call: raw.Call) -> tuple[Any, ...]:
    count = len(call.operands)
    return call.training, call.eps, call.program, call.after, count, call.precision


def start(recipe: _launch.Recipe, call: raw.Call, records: bool) -> Tensor:
    """Launch a planned call, and record it for autograd if it `records`.

    Nothing is active that must see the call: `_gate.is_plain_eager`.
    """
    if not records:
        return raw.launch(recipe, call, None)
    running = call.running_mean, call.running_var
    save = raw.new_save(recipe, True) if call.training else running_save(*running)
    out = raw.launch(recipe, call, save)
    tensors = (*call[:2], *call[6:8], *call.operands, *call.after_operands)
    recorded: Tensor = _apply([out, save], _settings(call), *tensors)
    return recorded


def record(
    module: torch.nn.Module,
    seen: _replay.Seen,
    sources: Sequence[_replay.Source],
    call: raw.Call,
    memo: _memo.Memo,
) -> _memo.Replay | None:
    """What makes this call of `module` again; None if that takes more than a launch.

    `sources` are those of `raw.tensors`.
    """
    tensors, tail = raw.tensors(call), raw.TAILS[call.training]
    tier = config.resolve_tier(call.precision)
    recipe = memo.hit(list(tensors), call.program, tier, tail, call.after)
    if recipe is None or not _gate.is_plain_eager():  # under autocast another call was made
        return None
    numbers = (recipe, call.words, call.momentum, call.eps)
    if not raw.needs_grad(call):
        return _replay.record(module, seen, sources, tensors, *numbers)
    if not call.training:  # the running statistics are saved
        return None
    inner = range(3, 3 + len(call.operands))
    outer = range(inner.stop + len(raw.statistics(call)), len(tensors))
    recorded = (0, 1, inner.stop, inner.stop + 1, *inner, *outer)
    return _replay.record(
        module, seen, sources, tensors, *numbers, _apply, _settings(call), recorded
    )
