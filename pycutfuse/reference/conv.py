"""Convolutions with a program."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from pycutfuse.geometry import Geometry
from pycutfuse.reference.linear_batch_norm import batch_norm
from pycutfuse.reference.program import apply_program


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """torch's conv2d; what is padded below and right only, as torch pads for "same"."""
    above, left, below, right = geometry.padding
    if not geometry.symmetric:
        x = F.pad(x, (0, right - left, 0, below - above))
    rest = geometry.stride, (above, left), geometry.dilation, geometry.groups
    return F.conv2d(x, weight, bias, *rest)


def conv_transpose2d(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """torch's conv_transpose2d."""
    stride, padding, dilation, output_padding, groups, _ = geometry
    rest = stride, padding[:2], output_padding, groups, dilation
    return F.conv_transpose2d(x, weight, bias, *rest)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    codes: Sequence[int],
    constants: Sequence[float],
    operands: Sequence[Tensor],
    wide: bool = False,
) -> Tensor:
    """program(conv(x, weight) + bias), transposed or not; `wide`: convolved in float64."""
    contract = conv_transpose2d if geometry.transposed else conv2d
    if wide:
        bias = None if bias is None else bias.double()
        value = contract(x.double(), weight.double(), bias, geometry).to(x.dtype)
    else:
        value = contract(x, weight, bias, geometry)
    return apply_program(value, codes, constants, operands)


def conv2d_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
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
    wide: bool = False,
) -> Tensor:
    """after(batch_norm(program(conv(x, weight) + bias))); `statistics` as in `batch_norm`."""
    z = convolution(x, weight, bias, geometry, codes, constants, operands, wide)
    y = batch_norm(z, statistics, training, momentum, eps)
    return apply_program(y, after_codes, after_constants, after_operands)
