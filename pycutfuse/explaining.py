"""explain."""

from collections.abc import Callable
from inspect import signature
from typing import Any

from torch import Tensor, nn

from pycutfuse import ops
from pycutfuse.nn import (
    Conv2d,
    Conv2dBatchNorm2dScale,
    ConvTranspose2d,
    Linear,
    LinearLogSumExp,
    LinearScaleBatchNorm1d,
    LinearSigmoidLinearLogSumExp,
)
from pycutfuse.nn._base import FusedModule
from pycutfuse.ops import _explain, _explain_conv, _explain_logsumexp, _gate
from pycutfuse.ops._chain import NAME as CHAIN
from pycutfuse.ops._conv import prepare_conv2d, prepare_conv_transpose2d
from pycutfuse.ops._conv_batch_norm import prepare as prepare_conv2d_batch_norm
from pycutfuse.ops._conv_call import BATCH_NORM, Call
from pycutfuse.ops._explain import Explanation
from pycutfuse.ops._linear import prepare as prepare_linear
from pycutfuse.ops._linear_batch_norm import prepare as prepare_linear_batch_norm

__all__ = ["Explanation", "explain"]


# How each functional convolution makes its call.
_CONVOLUTIONS: dict[object, Callable[..., Call]] = {
    ops.conv2d: prepare_conv2d,
    ops.conv_transpose2d: prepare_conv_transpose2d,
    ops.conv2d_batch_norm: prepare_conv2d_batch_norm,
}


def explain(
    module_or_op: nn.Module | Callable[..., Any], *inputs: Any, **options: Any
) -> Explanation:
    """Say which kernel, tier and policy a call would use, or why PyTorch would run instead.

    Nothing is launched and no statistic changes; the decision is the one the call itself makes.

    Parameters
    ----------
    module_or_op : torch.nn.Module or function
        A pycutfuse module, or a function of `pycutfuse.ops`.
    *inputs, **options
        Arguments of the call.

    Returns
    -------
    Explanation
        ``str()`` of it is a few lines of text.

    Raises
    ------
    TypeError
        If `module_or_op` is neither, or the arguments are not those of its call.
    RuntimeError, ValueError
        If the call is invalid, as the call itself.

    Examples
    --------
    >>> import torch, pycutfuse as pcf
    >>> layer = pcf.nn.Linear(3, 4, epilogue=(pcf.relu(),))
    >>> print(pcf.explain(layer, torch.ones(2, 3)))
    linear: fallback (cpu tensors)
      tier: ieee
      program: add(operand 0) | relu
    """
    if isinstance(module_or_op, FusedModule):
        return _explain_module(module_or_op, *_arguments(module_or_op, inputs, options))
    name = getattr(module_or_op, "__name__", type(module_or_op).__name__)
    if getattr(ops, name, None) is module_or_op:
        _check_arguments(module_or_op, inputs, options)
    for function, prepare in _CONVOLUTIONS.items():
        if module_or_op is function:
            return _explain_conv.explain_conv(prepare(*inputs, **options))
    if module_or_op is ops.linear:
        return _explain.explain_linear(*prepare_linear(*inputs, **options))
    if module_or_op is ops.linear_batch_norm:
        return _explain.explain_linear_batch_norm(prepare_linear_batch_norm(*inputs, **options))
    if module_or_op is ops.linear_logsumexp:
        return _explain_logsumexp.explain_linear_logsumexp(*prepare_linear(*inputs, **options))
    if module_or_op is ops.logsumexp:
        return _explain.explain_logsumexp(*inputs, **options)
    raise TypeError(
        f"{name} is no pycutfuse module or operator; explain its pycutfuse.nn children one by one"
    )


def _check_arguments(
    function: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """In the function's name, not in that of what makes its call."""
    try:
        signature(function).bind(*inputs, **options)
    except TypeError as error:
        raise TypeError(f"{function.__name__}: {error}") from None


def _arguments(
    module: FusedModule, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, ...]:
    """Arguments of the module's forward in their order, x first and a Tensor."""
    given = signature(type(module).forward).bind(module, *inputs, **options).args[1:]
    _gate.check_tensor(given[0])
    return given


def _explain_module(layer: FusedModule, x: Tensor, *rest: Any) -> Explanation:
    if isinstance(layer, LinearSigmoidLinearLogSumExp):
        reason = layer.why_chain(x)
        if reason is not None:
            return _explain.explain_chain(CHAIN, reason, x, layer.precision)
        return _explain_logsumexp.explain_linear_linear_logsumexp(layer.call_arguments(x))
    if isinstance(layer, Linear):
        reason = layer.epilogue.why_chain()
        if reason is not None:
            return _explain.explain_chain(layer._name, reason, x, layer.precision)
        if isinstance(layer, LinearLogSumExp):
            return _explain_logsumexp.explain_linear_logsumexp(*layer.run_arguments(x))
        return _explain.explain_linear(*layer.run_arguments(x))
    if isinstance(layer, LinearScaleBatchNorm1d):
        reason = layer.why_chain(x)
        if reason is not None:
            return _explain.explain_chain("linear_batch_norm", reason, x, layer.precision)
        return _explain.explain_linear_batch_norm(layer.call_arguments(x))
    assert isinstance(layer, (Conv2d, ConvTranspose2d, Conv2dBatchNorm2dScale))
    return _explain_conv_module(layer, x, *rest)


def _explain_conv_module(
    layer: Conv2d | ConvTranspose2d | Conv2dBatchNorm2dScale, x: Tensor, *rest: Any
) -> Explanation:
    if isinstance(layer, Conv2dBatchNorm2dScale):
        name, reason = BATCH_NORM, layer.why_chain()
        make: Callable[..., Call] = layer.call_arguments
    else:
        name = "conv2d" if isinstance(layer, Conv2d) else "conv_transpose2d"
        reason, make = layer.epilogue.why_chain(), layer.run_arguments
    if reason is not None:
        return _explain_conv.explain_chain(name, reason, x, layer.precision)
    return _explain_conv.explain_conv(make(x, *rest))
