"""One call of a convolution operator: its arguments, what makes it invalid, what it falls back to.

Both raw operators, with and without batch norm, read it; ``norm`` is None for the one without.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pycutfuse import config, reference
from pycutfuse.geometry import Geometry, operator_of, output_shape
from pycutfuse.ops import _gate
from pycutfuse.program import EMPTY, OPS, Encoded

BATCH_NORM = "conv2d_batch_norm"
HAND_OVER = 'precision="torch"'


class Norm(NamedTuple):
    """Batch norm and the program after it."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    training: bool
    momentum: float  # negative: None
    eps: float
    after: Encoded
    operands: Sequence[Tensor]


class Call(NamedTuple):
    """Arguments of one call. The program does not hold the bias, which torch's function takes."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    snapshot: Tensor | None  # of a frozen weight, see `pycutfuse.ops._conv_packed`
    geometry: Geometry
    program: Encoded
    operands: Sequence[Tensor]
    precision: str
    norm: Norm | None = None


# Functions and no properties: torch.compile reads those of a named tuple from torch 2.11 on.


def operator_name(call: Call) -> str:
    """Of the operator that is called."""
    return operator_of(call.geometry) if call.norm is None else BATCH_NORM


def tail(call: Call) -> str:
    """As `pycutfuse.support.ConvProblem` names it."""
    if call.norm is None:
        return "none"
    return "batch_norm_train" if call.norm.training else "batch_norm_eval"


def after(call: Call) -> Encoded:
    """The program after the tail."""
    return EMPTY if call.norm is None else call.norm.after


def after_operands(call: Call) -> Sequence[Tensor]:
    """Operands of `after`."""
    return () if call.norm is None else call.norm.operands


def statistics(norm: Norm | None) -> tuple[Tensor | None, ...]:
    """weight, bias, running_mean, running_var and num_batches_tracked, if there is a batch norm."""
    return () if norm is None else norm[:5]


def tensors(call: Call) -> list[Tensor | None]:
    """All of a call's, in the order in which caches take their metadata."""
    given = [*call[:4], *call.operands]
    return given if call.norm is None else [*given, *call.norm[:5], *call.norm.operands]


def with_bias(program: Encoded) -> Encoded:
    """`program` after the addition of a bias, which becomes operand 0."""
    moved = tuple(
        code + 1 if at % 2 and code >= 0 else code for at, code in enumerate(program.codes)
    )
    return Encoded((OPS["add"], 0, *moved), (0.0, 0.0, *program.constants), True)


def check_dtypes(call: Call) -> None:
    """Raise RuntimeError, as torch, for mixed dtypes outside autocast."""
    _gate.check_dtypes(call.x, call.weight, call.bias, operator_name(call))


def check(call: Call) -> tuple[int, ...]:
    """Raise, as torch, if shapes do not fit; else the shape of the result. Changes nothing."""
    shape = output_shape(call.x, call.weight, call.bias, call.geometry)
    _gate.check_operands(shape, call.operands, "program")
    norm = call.norm
    if norm is not None:
        _check_norm(shape, norm)
        _gate.check_operands(shape, norm.operands, "program after the tail")
    return shape


def _check_norm(shape: tuple[int, ...], norm: Norm) -> None:
    if len(shape) != 4:
        raise ValueError(
            f"{BATCH_NORM}: expected 4D input (got {len(shape)}D output of the convolution); give "
            "x as (N, C, H, W), x.unsqueeze(0)?"
        )
    check_one_value(shape, norm.training)
    if not norm.training and (norm.running_mean is None or norm.running_var is None):
        raise RuntimeError(
            f"{BATCH_NORM}: running_mean and running_var must be defined in evaluation mode; "
            "give both or training=True"
        )
    names = ("bn_weight", "bn_bias", "running_mean", "running_var")
    for name, tensor in zip(names, norm[:4], strict=True):
        if tensor is not None and (tensor.dim() != 1 or tensor.shape[0] != shape[1]):
            raise RuntimeError(
                f"{BATCH_NORM}: {name} should contain {shape[1]} elements (output channels) but "
                f"has shape {tuple(tensor.shape)}"
            )


def check_one_value(shape: Sequence[int], training: bool) -> None:
    """Raise ValueError, as torch, for statistics of one value per channel."""
    if training and shape[0] * shape[2] * shape[3] == 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, got input size "
            f"{list(shape)}; give a larger batch or image, or call .eval()"
        )


def why_reference(call: Call) -> str | None:
    """As `_gate.why_reference`."""
    own = () if call.bias is None else (call.bias,)
    operands = (*own, *call.operands, *after_operands(call))
    reason = _gate.why_reference(call.x, call.weight, operands, statistics(call.norm), 4)
    if reason is None and (0 in call.x.shape[-3:] or 0 in call.weight.shape):
        return "no channels or no pixels"
    return reason


def is_recorded(call: Call) -> bool:
    """Whether autograd must record the call."""
    if not torch.is_grad_enabled():
        return False
    own = (call.bias, *call.operands, *after_operands(call), *statistics(call.norm)[:2])
    return _gate.any_requires_grad(call.x, call.weight, own)


def is_strict(x: Tensor, precision: str) -> bool:
    """As `_contraction.is_strict`, of convolutions."""
    return _gate.asks_ieee(x, precision) and config.torch_conv_tier() != "ieee"


def by_chain(call: Call) -> Tensor:
    """The plain torch chain, with torch's own autograd, at the tier that an "ieee" call asks for.

    There it goes through float64, as gradients too would follow torch's flags.
    """
    wide = is_strict(call.x, call.precision)
    head = (call.x, call.weight, call.bias, call.geometry)
    program = (call.program.codes, call.program.constants, call.operands)
    norm = call.norm
    if norm is None:
        return reference.convolution(*head, *program, wide)
    return reference.conv2d_batch_norm(
        *head,
        *program,
        norm[:5],
        norm.training,
        norm.momentum,
        norm.eps,
        norm.after.codes,
        norm.after.constants,
        norm.operands,
        wide,
    )
