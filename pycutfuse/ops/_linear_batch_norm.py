"""Linear, program, batch norm, program: the autograd function and the functional API."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from pycutfuse import config, reference
from pycutfuse.ops import _gate, _handover, _launch, _vjp
from pycutfuse.ops import _linear_batch_norm_raw as raw
from pycutfuse.ops._contraction import is_strict
from pycutfuse.ops._launch import Recipe
from pycutfuse.ops._linear import check_call
from pycutfuse.ops._linear_batch_norm_planned import gradients, running_save, start
from pycutfuse.ops._linear_batch_norm_raw import NAME, Call
from pycutfuse.ops._memo import Memo
from pycutfuse.program import Encoded, Program, encode, operands_of


class LinearBatchNormFunction(torch.autograd.Function):
    """Records the raw operator; running statistics are updated in forward only."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        planes: Tensor | None,
        words: Tensor | None,
        bn_weight: Tensor | None,
        bn_bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        num_batches_tracked: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        program: tuple[tuple[int, ...], tuple[float, ...]],
        after: tuple[tuple[int, ...], tuple[float, ...]],
        operand_count: int,
        precision: str,
        *operands: Tensor,
    ) -> Tensor:
        call = Call(
            x,
            weight,
            planes,
            words,
            Encoded(*program),
            operands[:operand_count],
            bn_weight,
            bn_bias,
            running_mean,
            running_var,
            num_batches_tracked,
            training,
            momentum,
            eps,
            Encoded(*after),
            operands[operand_count:],
            precision,
        )
        out, save = raw.forward(*raw.flat(call))
        if not training:
            save = running_save(running_mean, running_var, save.dtype)
        ctx.save_for_backward(x, weight, bn_weight, bn_bias, save, *operands)
        ctx.settings = (training, eps, program, after, operand_count, precision)
        result: Tensor = out
        return result

    @staticmethod
    @_vjp.once_differentiable
    def backward(ctx: Any, saved: Sequence[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
        asked = ctx.needs_input_grad
        needs = [asked[0], asked[1], asked[4], asked[5], *asked[16:]]
        found = gradients(grad, saved, ctx.settings, needs)
        return *found[:2], None, None, *found[2:4], *([None] * 10), *found[4:]


def run(call: Call, memo: Memo | None = None) -> Tensor:
    """Run the operator, or the plain chain where the operator cannot answer."""
    check_eps(call.eps, call.training)
    if _gate.is_plain_eager():
        tier = config.resolve_tier(call.precision)
        find = _launch.cached if memo is None else memo.find
        found = None if tier == "torch" else raw.find(find, call, tier)
        if isinstance(found, Recipe):
            return start(found, call, raw.needs_grad(call))
        known = found is not None and not raw.needs_grad(call)
        if known and _handover.is_handed_over(NAME, found, call.x, tier):
            return _chain(call)
    if _gate.autocasts(call.x):
        return _under_autocast(call, memo)
    _gate.check_bias(call.weight, call.program, call.operands)
    reason = raw.why_reference(call)
    if reason is not None:
        return _by_chain(call, reason)
    if raw.needs_grad(call):
        function: Any = LinearBatchNormFunction
        recorded: Tensor = function.apply(
            *call[:4],
            *call[6:14],
            (call.program.codes, call.program.constants),
            (call.after.codes, call.after.constants),
            len(call.operands),
            call.precision,
            *call.operands,
            *call.after_operands,
        )
        return recorded
    out: Tensor = raw.forward(*raw.flat(call))[0]
    return out


def _under_autocast(call: Call, memo: Memo | None) -> Tensor:
    reason = _gate.why_not_autocast(call.program, call.after)
    if reason is not None:
        return _by_chain(call, reason)
    x, weight, operands = _gate.autocast(call.x, call.weight, call.program, call.operands)
    cast = call._replace(x=x, weight=weight, planes=None, words=None, operands=operands)
    with torch.autocast("cuda", enabled=False):
        return run(cast, memo)


def _by_chain(call: Call, reason: str) -> Tensor:
    _gate.check_dtypes(call.x, call.weight)
    raw.check(call)
    config.report_fallback(NAME, reason)
    return _chain(call)


def _chain(call: Call) -> Tensor:
    program, after = call.program, call.after
    return reference.linear_batch_norm(
        call.x,
        call.weight,
        program.codes,
        program.constants,
        call.operands,
        raw.statistics(call),
        call.training,
        call.momentum,
        call.eps,
        after.codes,
        after.constants,
        call.after_operands,
        program.biased,
        is_strict(call.x, call.precision),
    )


def linear_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    epilogue: Program = (),
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    after: Program = (),
    precision: config.Precision | None = None,
) -> Tensor:
    r"""``after(batch_norm(program(x @ weight.T + bias)))``, statistics over the rows.

    With mean and var of the batch (biased) in training, else the running ones::

        y = (z - mean) / sqrt(var + eps) * bn_weight + bn_bias

    Parameters
    ----------
    x : Tensor
        ``(N, in_features)``, any strides.
    weight : Tensor
        ``(out_features, in_features)``, any strides.
    bias : Tensor, optional
        ``(out_features,)``; it counts as one step of `epilogue`.
    epilogue, after : sequence of Step
        Programs before and after the normalisation, at most 16 steps each.
    running_mean, running_var : Tensor, optional
        ``(out_features,)``; updated in place in training (var unbiased), read in evaluation. Of
        x's dtype or float32, as `bn_weight` and `bn_bias`.
    num_batches_tracked : Tensor, optional
        int64, 0-dim; counted in training.
    bn_weight, bn_bias : Tensor, optional
        ``(out_features,)``; 1 and 0 if None.
    training : bool
        Use the statistics of the batch.
    momentum : float or None
        Update factor; None means ``1 / num_batches_tracked`` (0 without a count), as torch.
    eps : float
        Added to the variance; above 0 in training.
    precision : {"ieee", "tf32", "torch"}, optional
        As in `linear`.

    Returns
    -------
    Tensor
        ``(N, out_features)``, of the dtype that torch's chain has; which dtypes run fused, and what
        autocast casts, is as in `linear`.

    Raises
    ------
    ValueError
        If x is not 2D, or in training for one sample or, since torch 2.10, an eps of 0; if momentum
        is negative, a program too long or the precision unknown. Nothing has changed then.
    RuntimeError
        If shapes or dtypes do not fit, or running statistics are missing in evaluation.
    TypeError
        If an argument is no tensor, a step no `Step`, or eps no number.

    Examples
    --------
    >>> import torch, pycutfuse as pcf
    >>> x, weight = torch.tensor([[1.0], [3.0]]), torch.ones(2, 1)
    >>> pcf.ops.linear_batch_norm(x, weight, training=True)
    tensor([[-1.0000, -1.0000],
            [ 1.0000,  1.0000]])
    """
    return run(
        prepare(
            x,
            weight,
            bias,
            epilogue=epilogue,
            running_mean=running_mean,
            running_var=running_var,
            num_batches_tracked=num_batches_tracked,
            bn_weight=bn_weight,
            bn_bias=bn_bias,
            training=training,
            momentum=momentum,
            eps=eps,
            after=after,
            precision=precision,
        )
    )


def prepare(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    epilogue: Program = (),
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    after: Program = (),
    precision: config.Precision | None = None,
) -> Call:
    """Arguments of the raw operator for a call of `linear_batch_norm`."""
    config.check_precision(precision)
    check_call(x, weight, bias)
    program, outer = encode(epilogue, bias=bias is not None), encode(after)
    operands = operands_of(epilogue)
    if bias is not None:
        operands = [bias, *operands]
    return Call(
        x,
        weight,
        None,
        None,
        program,
        operands,
        bn_weight,
        bn_bias,
        running_mean,
        running_var,
        num_batches_tracked,
        training,
        encode_momentum(momentum, num_batches_tracked),
        eps,
        outer,
        operands_of(after),
        precision or config.current_precision(),
    )


CHECKS_EPS = torch.__version__ >= "2.10"
"""Whether torch refuses an eps that adds nothing to the variance."""


def check_eps(eps: float, training: bool) -> None:
    """Raise TypeError or ValueError, as torch, unless `eps` is a number that may be added."""
    if not isinstance(eps, (float, int, Real, Tensor)):
        raise TypeError(f"batch_norm(): eps is a {type(eps).__name__}; it must be a real number")
    if CHECKS_EPS and (eps < 0 or (training and eps == 0)):
        least = "above 0 in training" if training else "at least 0"
        raise ValueError(f"batch_norm(): eps is {eps}; it must be {least}")


def encode_momentum(momentum: float | None, num_batches_tracked: Tensor | None) -> float:
    """Momentum as it crosses the dispatcher: negative for None.

    Raises
    ------
    ValueError
        If it is negative itself.
    """
    if momentum is None:
        return 0.0 if num_batches_tracked is None else -1.0
    if momentum < 0:
        raise ValueError(f"momentum is {momentum}; it must be at least 0, or None")
    return momentum
