"""Convolution, program, batch norm, program: the autograd functions and the functional API."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pycutfuse import config
from pycutfuse.geometry import Geometry, conv2d_geometry
from pycutfuse.ops import _conv_batch_norm_raw as raw
from pycutfuse.ops import _conv_call, _conv_launch, _gate, _vjp
from pycutfuse.ops._conv import autocasts, check_tensors, is_handed_over, make_call, refuse
from pycutfuse.ops._conv_call import Call, Norm
from pycutfuse.ops._conv_launch import ConvRecipe
from pycutfuse.ops._conv_memo import ConvMemo
from pycutfuse.ops._linear_batch_norm import check_eps, encode_momentum
from pycutfuse.program import Encoded, Program, encode, operands_of


def _remember(ctx: Any, call: Call, save: Tensor, operands: Sequence[Tensor]) -> None:
    norm = raw.norm_of(call)
    if not norm.training:
        # A copy: a later forward in training changes the running statistics in place.
        assert norm.running_mean is not None
        assert norm.running_var is not None
        save = torch.stack((norm.running_mean, norm.running_var)).to(save.dtype)
    ctx.save_for_backward(*call[:3], norm.weight, norm.bias, save, *operands)
    program, after = call.program, norm.after
    programs = (program.codes, program.constants), (after.codes, after.constants)
    settings = (tuple(call.geometry), norm.training, norm.eps, *programs)
    ctx.settings = (*settings, len(call.operands), call.precision)


def _gradients(
    ctx: Any, saved: Sequence[Any], grad: Tensor, needs: list[bool]
) -> list[Tensor | None]:
    """Of x, weight, bias, bn_weight, bn_bias and the operands."""
    x, weight, bias, bn_weight, bn_bias, save, *operands = saved
    geometry, training, eps, program, after, count, precision = ctx.settings
    if not training:
        mean, var = save.unbind(0)
        save = torch.stack((mean, torch.rsqrt(var + eps)))
    head = (grad, x, weight, bias, *geometry, *program, operands[:count])
    norm = (bn_weight, bn_bias, save, training, eps, *after, operands[count:])
    return _vjp.restore(raw.backward(*head, *norm, precision, needs), needs)


class ConvBatchNormFunction(torch.autograd.Function):
    """Records the raw operator; running statistics are updated in forward only."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        snapshot: Tensor | None,
        bn_weight: Tensor | None,
        bn_bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        num_batches_tracked: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        geometry: tuple[Any, ...],
        program: tuple[tuple[int, ...], tuple[float, ...]],
        after: tuple[tuple[int, ...], tuple[float, ...]],
        operand_count: int,
        precision: str,
        *operands: Tensor,
    ) -> Tensor:
        inner, outer = operands[:operand_count], operands[operand_count:]
        statistics = (bn_weight, bn_bias, running_mean, running_var, num_batches_tracked)
        norm = Norm(*statistics, training, momentum, eps, Encoded(*after), outer)
        rest = (Geometry(*geometry), Encoded(*program), inner, precision, norm)
        call = Call(x, weight, bias, snapshot, *rest)
        out, save = raw.forward(*raw.flat(call))
        _remember(ctx, call, save, operands)
        result: Tensor = out
        return result

    @staticmethod
    @_vjp.once_differentiable
    def backward(ctx: Any, saved: Sequence[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
        asked = ctx.needs_input_grad
        needs = [*asked[:3], asked[4], asked[5], *asked[17:]]
        found = _gradients(ctx, saved, grad, needs)
        return *found[:3], None, *found[3:5], *([None] * 11), *found[5:]


class PlannedFunction(torch.autograd.Function):
    """As `ConvBatchNormFunction` for a planned call: what differentiates nothing stays in it."""

    @staticmethod
    def forward(
        ctx: Any,
        recipe: ConvRecipe,
        call: Call,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        bn_weight: Tensor | None,
        bn_bias: Tensor | None,
        *operands: Tensor,
    ) -> Tensor:
        save = raw.new_save(recipe, raw.norm_of(call).training)
        out = _conv_launch.launch(recipe, call, save)
        _remember(ctx, call, save, operands)
        return out

    @staticmethod
    @_vjp.once_differentiable
    def backward(ctx: Any, saved: Sequence[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = list(ctx.needs_input_grad[2:])
        return None, None, *_gradients(ctx, saved, grad, needs)


_apply = _gate.plain_apply(PlannedFunction)


def _start(recipe: ConvRecipe, call: Call) -> Tensor:
    if not _conv_call.is_recorded(call):
        return _conv_launch.launch(recipe, call)
    norm = raw.norm_of(call)
    head = (recipe, call, *call[:3], norm.weight, norm.bias)
    recorded: Tensor = _apply(*head, *call.operands, *norm.operands)
    return recorded


def run(call: Call, memo: ConvMemo | None = None) -> Tensor:
    """Run the operator, or the plain chain where the operator cannot answer."""
    norm = raw.norm_of(call)
    check_eps(norm.eps, norm.training)
    if _gate.is_plain_eager():
        tier = config.resolve_conv_tier(call.precision)
        find = _conv_launch.cached if memo is None else memo.find
        found = None if tier == "torch" else find(call, tier)
        if isinstance(found, ConvRecipe):
            return _start(found, call)
        if is_handed_over(found, call, tier):
            return _conv_call.by_chain(call)
    if _gate.autocasts(call.x):
        cast, reason = autocasts(call)
        if reason is not None:
            return refuse(call, reason)
        with torch.autocast("cuda", enabled=False):
            return run(cast, memo)
    reason = _conv_call.why_reference(call)
    if reason is not None:
        return refuse(call, reason)
    _conv_call.check_dtypes(call)
    if not _conv_call.is_recorded(call):
        out: Tensor = raw.forward(*raw.flat(call))[0]
        return out
    function: Any = ConvBatchNormFunction
    programs = (
        (call.program.codes, call.program.constants),
        (norm.after.codes, norm.after.constants),
    )
    rest = (tuple(call.geometry), *programs, len(call.operands), call.precision)
    recorded: Tensor = function.apply(*call[:4], *norm[:8], *rest, *call.operands, *norm.operands)
    return recorded


def conv2d_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
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
    r"""``after(batch_norm(program(conv2d(x, weight) + bias)))``, statistics for each channel.

    With mean and var of the batch (biased) in training, else the running ones::

        y = (z - mean) / sqrt(var + eps) * bn_weight + bn_bias

    Parameters
    ----------
    x : Tensor
        ``(N, C, H, W)``, any strides.
    weight : Tensor
        ``(K, C / groups, R, S)``, any strides.
    bias : Tensor, optional
        ``(K,)``; it counts as one step of `epilogue`.
    stride, padding, dilation, groups
        As `conv2d`.
    epilogue, after : sequence of Step
        Programs before and after the normalisation, at most 16 steps each.
    running_mean, running_var : Tensor, optional
        ``(K,)``; updated in place in training (var unbiased), read in evaluation. Of x's dtype or
        float32, as `bn_weight` and `bn_bias`.
    num_batches_tracked : Tensor, optional
        int64, 0-dim; counted in training.
    bn_weight, bn_bias : Tensor, optional
        ``(K,)``; 1 and 0 if None.
    training : bool
        Use the statistics of the batch.
    momentum : float or None
        Update factor; None means ``1 / num_batches_tracked`` (0 without a count), as torch.
    eps : float
        Added to the variance; above 0 in training.
    precision : {"ieee", "tf32", "torch"}, optional
        As in `conv2d`.

    Returns
    -------
    Tensor
        ``(N, K, P, Q)``, in the memory format of `conv2d`; which calls run fused, and what
        autocast casts, is as there.

    Raises
    ------
    ValueError
        If x is not 4D, or in training for one value per channel or, since torch 2.10, an eps of 0;
        if momentum is negative, a program too long or the precision unknown. Nothing has changed
        then.
    RuntimeError
        If shapes or dtypes do not fit, or running statistics are missing in evaluation.
    TypeError
        If an argument is no tensor, a step no `Step`, or eps no number.

    Examples
    --------
    >>> import torch, pycutfuse as pcf
    >>> x, weight = torch.tensor([[[[1.0, 3.0]]]]), torch.ones(2, 1, 1, 1)
    >>> pcf.ops.conv2d_batch_norm(x, weight, training=True)
    tensor([[[[-1.0000,  1.0000]],
    <BLANKLINE>
             [[-1.0000,  1.0000]]]])
    """
    made = prepare(
        x,
        weight,
        bias,
        stride,
        padding,
        dilation,
        groups,
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
    return run(made)


def prepare(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
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
    """Arguments of `run` for a call of `conv2d_batch_norm`."""
    check_tensors("conv2d_batch_norm", x, weight, bias)
    geometry = conv2d_geometry(weight, stride, padding, dilation, groups)
    call = make_call(x, weight, bias, geometry, epilogue, precision)
    norm = Norm(
        bn_weight,
        bn_bias,
        running_mean,
        running_var,
        num_batches_tracked,
        training,
        encode_momentum(momentum, num_batches_tracked),
        eps,
        encode(after),
        tuple(operands_of(after)),
    )
    return call._replace(norm=norm)
