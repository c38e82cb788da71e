"""Linear with a program, batch normalisation of its columns, and a second program."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from pycutfuse.reference.linear import linear
from pycutfuse.reference.program import apply_program


def update_factor(num_batches_tracked: Tensor | None, momentum: float, training: bool) -> float:
    """Count the batch as nn.BatchNorm1d does and return its update factor.

    A negative `momentum` means None: the factor is 1 / num_batches_tracked.
    """
    if training and num_batches_tracked is not None:
        num_batches_tracked.add_(1)
        if momentum < 0:
            return 1.0 / float(num_batches_tracked)
    return max(momentum, 0.0)


def batch_norm(
    z: Tensor,
    statistics: Sequence[Tensor | None],
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """nn.BatchNorm1d's forward on z.

    `statistics` holds bn_weight, bn_bias, running_mean, running_var and num_batches_tracked.
    """
    bn_weight, bn_bias, running_mean, running_var, num_batches_tracked = statistics
    factor = update_factor(num_batches_tracked, momentum, training)
    return F.batch_norm(z, running_mean, running_var, bn_weight, bn_bias, training, factor, eps)


def linear_batch_norm(
    x: Tensor,
    weight: Tensor,
    codes: Sequence[int],
    constants: Sequence[float],
    operands: Sequence[Tensor],
    statistics: Sequence[Tensor | None],
    training: bool,
    momentum: float,
    eps: float,
    after_codes: Sequence[int],
    after_constants: Sequence[float],
    after_operands: Sequence[Tensor],
    biased: bool | None = None,
    wide: bool = False,
) -> Tensor:
    """after(batch_norm(program(x @ weight.T))); `biased` and `wide` as in `linear`."""
    z = linear(x, weight, codes, constants, operands, biased, wide)
    y = batch_norm(z, statistics, training, momentum, eps)
    return apply_program(y, after_codes, after_constants, after_operands)
