"""Logsumexp over the features of one linear layer with a program, or of two in a row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pycutfuse.reference.linear import linear


def linear_logsumexp(
    x: Tensor,
    weight: Tensor,
    codes: Sequence[int],
    constants: Sequence[float],
    operands: Sequence[Tensor],
    biased: bool | None = None,
    wide: bool = False,
) -> Tensor:
    """log(sum(exp(program(x @ weight.T)))) over the last dimension; the rest as in `linear`."""
    return torch.logsumexp(linear(x, weight, codes, constants, operands, biased, wide), -1)


def linear_linear_logsumexp(
    x: Tensor,
    weight: Tensor,
    codes: Sequence[int],
    constants: Sequence[float],
    operands: Sequence[Tensor],
    second_weight: Tensor,
    second_codes: Sequence[int],
    second_constants: Sequence[float],
    second_operands: Sequence[Tensor],
    biased: bool | None = None,
    second_biased: bool | None = None,
    wide: bool = False,
) -> Tensor:
    """`linear_logsumexp` of program(x @ weight.T)."""
    hidden = linear(x, weight, codes, constants, operands, biased, wide)
    second = (second_codes, second_constants, second_operands, second_biased, wide)
    return linear_logsumexp(hidden, second_weight, *second)
