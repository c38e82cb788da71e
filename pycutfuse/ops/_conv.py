"""Convolutions with a program: the autograd function and the functional API."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pycutfuse import config
from pycutfuse.geometry import Geometry, conv2d_geometry, conv_transpose2d_geometry
from pycutfuse.ops import _conv_call, _conv_launch, _gate, _vjp
from pycutfuse.ops import _conv_raw as raw
from pycutfuse.ops._conv_call import Call
from pycutfuse.ops._conv_memo import ConvMemo
from pycutfuse.ops._launch import Refusal
from pycutfuse.program import Encoded, Program, check_program, encode, operands_of


class ConvFunction(torch.autograd.Function):
    """Records the raw operator; backward is the vjp of the reference, once differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        snapshot: Tensor | None,
        geometry: tuple[Any, ...],
        program: tuple[tuple[int, ...], tuple[float, ...]],
        precision: str,
        recipe: _conv_launch.ConvRecipe | None,
        *operands: Tensor,
    ) -> Tensor:
        needs = ctx.needs_input_grad[8:]
        kept, ctx.forms = _vjp.keep((bias, *operands), program[0], needs, before=1)
        ctx.save_for_backward(x, weight, *kept)
        ctx.settings = geometry, program, precision
        if recipe is not None:
            made = (Geometry(*geometry), Encoded(*program), operands, precision)
            return _conv_launch.launch(recipe, Call(x, weight, bias, snapshot, *made))
        given = (x, weight, bias, snapshot, *geometry, *program, operands, precision)
        out: Tensor = raw.forward(*given)
        return out

    @staticmethod
    @_vjp.once_differentiable
    def backward(ctx: Any, saved: Sequence[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *rest = saved
        bias, *operands = _vjp.kept(rest, ctx.forms)
        geometry, program, precision = ctx.settings
        asked = ctx.needs_input_grad
        needs = [*asked[:3], *asked[8:]]
        given = (grad, x, weight, bias, *geometry, *program, operands, precision, needs)
        found = _vjp.restore(raw.backward(*given), needs)
        return *found[:3], None, None, None, None, None, *found[3:]


_apply = _gate.plain_apply(ConvFunction)


def _start(recipe: _conv_launch.ConvRecipe, call: Call) -> Tensor:
    if not _conv_call.is_recorded(call):
        return _conv_launch.launch(recipe, call)
    program = (call.program.codes, call.program.constants)
    head = (*call[:4], tuple(call.geometry), program, call.precision, recipe)
    recorded: Tensor = _apply(*head, *call.operands)
    return recorded


def is_handed_over(found: object, call: Call, tier: str) -> bool:
    """As `_handover.is_handed_over`, at cuDNN's tier; False for what autograd records."""
    if not isinstance(found, Refusal) or found.fallback or _conv_call.is_recorded(call):
        return False
    if call.x.dtype is torch.float32 and config.torch_conv_tier() != tier:
        return False  # the chain would run at torch's tier
    config.count_handover(_conv_call.operator_name(call), found.reason)
    return True


def autocasts(
    call: Call, convert: Callable[[Tensor, torch.dtype], Tensor] = Tensor.to
) -> tuple[Call, str | None]:
    """The call as autocast casts it, or why its result needs the plain chain."""
    reason = _gate.why_not_autocast(call.program, _conv_call.after(call))
    if reason is not None:
        return call, reason
    biased = Encoded(biased=call.bias is not None)
    own = () if call.bias is None else (call.bias,)
    x, weight, cast = _gate.autocast(call.x, call.weight, biased, own, convert)
    bias = cast[0] if cast else None
    return call._replace(x=x, weight=weight, bias=bias, snapshot=None), None


def refuse(call: Call, reason: str) -> Tensor:
    """Run the plain chain of a call that no kernel takes; it is checked first."""
    _conv_call.check_dtypes(call)
    _conv_call.check(call)
    config.report_fallback(_conv_call.operator_name(call), reason)
    return _conv_call.by_chain(call)


def run(call: Call, memo: ConvMemo | None = None) -> Tensor:
    """Run the operator, or the plain chain where the operator cannot answer."""
    if _gate.is_plain_eager():
        tier = config.resolve_conv_tier(call.precision)
        find = _conv_launch.cached if memo is None else memo.find
        found = None if tier == "torch" else find(call, tier)
        if isinstance(found, _conv_launch.ConvRecipe):
            return _start(found, call)
        if is_handed_over(found, call, tier):
            return _conv_call.by_chain(call)
    _gate.check_tensor(call.x)
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
    if _conv_call.is_recorded(call):
        function: Any = ConvFunction
        program = (call.program.codes, call.program.constants)
        head = (*call[:4], tuple(call.geometry), program, call.precision, None)
        recorded: Tensor = function.apply(*head, *call.operands)
        return recorded
    out: Tensor = raw.forward(*raw.flat(call))
    return out


def check_tensors(operator: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise TypeError, as torch, unless they are tensors."""
    for name, value in (("x", x), ("weight", weight), ("bias", bias)):
        if not isinstance(value, Tensor) and not (name == "bias" and value is None):
            raise TypeError(f"{operator}: {name} is a {type(value).__name__}; it must be a Tensor")


def make_call(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    epilogue: Program,
    precision: config.Precision | None,
) -> Call:
    """The call of a function of this API."""
    config.check_precision(precision)
    check_program(epilogue, bias=bias is not None)
    tier = precision or config.current_precision()
    return Call(
        x, weight, bias, None, geometry, encode(epilogue), tuple(operands_of(epilogue)), tier
    )


def prepare_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    epilogue: Program = (),
    precision: config.Precision | None = None,
) -> Call:
    """Arguments of `run` for a call of `conv2d`."""
    check_tensors("conv2d", x, weight, bias)
    geometry = conv2d_geometry(weight, stride, padding, dilation, groups)
    return make_call(x, weight, bias, geometry, epilogue, precision)


def prepare_conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    epilogue: Program = (),
    precision: config.Precision | None = None,
) -> Call:
    """Arguments of `run` for a call of `conv_transpose2d`."""
    check_tensors("conv_transpose2d", x, weight, bias)
    geometry = conv_transpose2d_geometry(stride, padding, output_padding, groups, dilation)
    return make_call(x, weight, bias, geometry, epilogue, precision)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    epilogue: Program = (),
    precision: config.Precision | None = None,
) -> Tensor:
    r"""Convolution with a pointwise program in its epilogue: ``program(conv2d(x, weight) + bias)``.

    Parameters
    ----------
    x : Tensor
        ``(N, C, H, W)`` or ``(C, H, W)``, any strides.
    weight : Tensor
        ``(K, C / groups, R, S)``, any strides.
    bias : Tensor, optional
        ``(K,)``; it counts as one step.
    stride, padding, dilation, groups
        As torch.nn.functional.conv2d; padding in pixels, or ``"same"`` or ``"valid"``.
    epilogue : sequence of Step
        At most 16 steps, the bias included. Their operands broadcast to the output's shape, so one
        value per channel is ``(K, 1, 1)``, and do not grow it.
    precision : {"ieee", "tf32", "torch"}, optional
        Tier of this call; by default that of `pycutfuse.precision`, else what torch's flags for
        convolutions allow, which is TF32 unless they were changed. 16-bit tensors have one tier,
        and ``"torch"``.

    Returns
    -------
    Tensor
        ``(N, K, P, Q)`` or ``(K, P, Q)``, with P = (H + padding - dilation * (R - 1) - 1) // stride
        + 1 and Q likewise; channels_last if x or weight is, else contiguous. CUDA tensors of
        float32, float16 and bfloat16 run fused, as `linear`. Operands that are neither scalar, nor
        ``(K, 1, 1)``, nor of the output's shape run as the plain torch chain.

    Notes
    -----
    On compute capability 9.0, straight from x of any strides, whatever the kernel, stride, padding
    and dilation (groups of few channels waste most of a kernel), where the weight's reach is at
    most 127 pixels, strides are at most 16 and a patch of the image fits in shared memory; at
    ``"ieee"`` for sums of 16 to 4,608 terms. A 1x1 convolution of channels_last images, of stride 1
    and without padding and groups, is a matrix product of pixels by the kernels of `linear`, on
    every architecture that has those; its operands broadcast as they like. Where PyTorch is
    expected to be faster, which many channels and channels_last favour otherwise, it runs instead;
    `pycutfuse.explain` says which and why.

    Raises
    ------
    RuntimeError
        If shapes, dtypes or numbers do not fit, as torch.nn.functional.conv2d.
    TypeError
        If an argument is no tensor or no int, or a step no `Step`.
    ValueError
        If the program is too long or the precision unknown.

    Examples
    --------
    >>> import torch, pycutfuse as pcf
    >>> x, weight = torch.ones(1, 2, 3, 3), torch.ones(1, 2, 3, 3)
    >>> pcf.ops.conv2d(x, weight, stride=2, padding=1, epilogue=(pcf.mul(0.5),))
    tensor([[[[4., 4.],
              [4., 4.]]]])
    """
    given = (x, weight, bias, stride, padding, dilation, groups)
    return run(prepare_conv2d(*given, epilogue=epilogue, precision=precision))


def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    epilogue: Program = (),
    precision: config.Precision | None = None,
) -> Tensor:
    r"""Transposed convolution with a program: ``program(conv_transpose2d(x, weight) + bias)``.

    Parameters
    ----------
    x : Tensor
        ``(N, C, H, W)`` or ``(C, H, W)``, any strides.
    weight : Tensor
        ``(C, K / groups, R, S)``, any strides.
    bias : Tensor, optional
        ``(K,)``; it counts as one step.
    stride, padding, output_padding, groups, dilation
        As torch.nn.functional.conv_transpose2d, in its order.
    epilogue, precision
        As in `conv2d`.

    Returns
    -------
    Tensor
        ``(N, K, P, Q)`` or ``(K, P, Q)``, with P = (H - 1) * stride - 2 * padding + dilation *
        (R - 1) + output_padding + 1 and Q likewise; the rest as in `conv2d`, but for CUDA tensors
        contiguous where output_padding reaches stride, as torch's.

    Notes
    -----
    As `conv2d`. Of a stride, a kernel makes the phases of each channel at once and interleaves
    them; with a dilation too the plain torch chain runs.

    Raises
    ------
    RuntimeError, TypeError, ValueError
        As `conv2d`; RuntimeError also if output_padding reaches stride and dilation.

    Examples
    --------
    >>> import torch, pycutfuse as pcf
    >>> x, weight = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    >>> pcf.ops.conv_transpose2d(x, weight, stride=2).shape
    torch.Size([1, 1, 4, 4])
    """
    given = (x, weight, bias, stride, padding, output_padding, groups, dilation)
    return run(prepare_conv_transpose2d(*given, epilogue=epilogue, precision=precision))
