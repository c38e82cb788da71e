"""How kernels read a convolution's tensors: strides, and copies of what they cannot read in place.

Most kernels read planes, one per channel; a convolution may be a matrix product of pixels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pycutfuse.ops._layout import Operands, factor_view, operands_of
from pycutfuse.support import dtype_code

OPERAND_REASON = "an operand that is neither a scalar, nor one value per channel, nor a full tensor"
CHANNELS_LAST_REASON = "a full operand beside a channels_last result"
# Elements from the first to the last of an image, as kernels count them in 32 bits.
MAX_SPAN = 2**30
SPAN_REASON = "an image of more than 2^30 elements"


def x_strides(x: Tensor) -> tuple[bool, tuple[int, ...]] | None:
    """Whether x is to be copied, and its strides (N, C, H, W) then; None if it is too large."""
    channels, height, width = x.shape[-3:]
    strides = x.stride() if x.dim() == 4 else (0, *x.stride())
    sizes = zip((channels, height, width), strides[1:], strict=True)
    if sum((size - 1) * step for size, step in sizes) < MAX_SPAN:
        return False, strides
    if channels * height * width > MAX_SPAN:
        return None
    return True, (channels * height * width, height * width, width, 1)


def pixel_stride(x: Tensor, weight: Tensor, channels_last: bool) -> int:
    """Elements between pixels of x where they can be read as a matrix, else 0.

    16-bit tensors are read as `factor_view` says, without copies; then so is a 1x1 weight. Those of
    float32 beside NCHW results lie side by side, and planes and a 1x1 weight without gaps.
    """
    if x.itemsize == 4 and not channels_last and x.shape[-2:] != (1, 1):
        dense = weight.is_contiguous() or weight.shape[-2:] != (1, 1)
        return int(dense and x.is_contiguous())
    view = factor_view(x.movedim(-3, -1))
    if x.itemsize == 2:
        dense = weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last)
        dense = dense or weight.shape[-2:] != (1, 1)
        return view.row_stride if dense and not view.copy else 0
    if x.numel() == x.shape[-3]:
        return x.shape[-3]  # of one pixel: nothing lies there
    return 0 if view.copy else view.row_stride


def by_planes(
    bias: Tensor | None, operands: Sequence[Tensor], shape: tuple[int, ...], channels_last: bool
) -> Operands | str:
    """How to read bias and operands of a result of `shape`, or why a kernel does not."""
    flat: list[int] = []
    copies = []
    if bias is not None:
        flat += (0, bias.stride(0), 0, dtype_code(bias.dtype))
    for at, operand in enumerate(operands, len(flat) // 4):
        found = _strides(operand, shape, channels_last)
        if isinstance(found, str):
            return found
        flat += (0, *found, dtype_code(operand.dtype))
        if found[1] and not operand.is_contiguous():
            copies.append(at)
    return Operands(flat, tuple(copies), shape)


def by_any_planes(
    bias: Tensor | None, operands: Sequence[Tensor], shape: tuple[int, ...], channels_last: bool
) -> Operands | str:
    """As `by_planes`, of an NCHW result and whatever broadcasts to it, copied where it must be."""
    fitting = [
        operand.expand(shape) if isinstance(_strides(operand, shape, False), str) else operand
        for operand in operands
    ]
    return by_planes(bias, fitting, shape, channels_last)


def _strides(operand: Tensor, shape: Sequence[int], channels_last: bool) -> tuple[int, int] | str:
    """Channel and pixel stride by which a kernel reads `operand`, or why it does not."""
    if operand.numel() == 1:
        return 0, 0
    sizes = (1,) * (len(shape) - operand.dim()) + tuple(operand.shape)
    if operand.numel() == sizes[-3]:
        return operand.stride(-3), 0
    full = (1,) * (len(shape) - 4) + tuple(shape)
    if sizes != full:
        return OPERAND_REASON
    return CHANNELS_LAST_REASON if channels_last else (shape[-2] * shape[-1], 1)


def by_pixels(
    bias: Tensor | None, operands: Sequence[Tensor], shape: tuple[int, ...], channels_last: bool
) -> Operands:
    """As `by_planes`, of a matrix of pixels, which takes whatever broadcasts to `shape`."""
    own = () if bias is None else (bias,)
    pixels = [operand.expand(shape).movedim(-3, -1) for operand in operands]
    made = operands_of((*own, *pixels), (*shape[:-3], *shape[-2:], shape[-3]))
    flat = made.flat
    flat[1::4], flat[2::4] = flat[2::4], flat[1::4]  # channels first
    return Operands(flat, made.copies, shape)


def copied(layout: Operands, operands: Sequence[Tensor], by_pixels: bool) -> list[Tensor]:
    """`operands`, those of ``layout.copies`` in memory that one pair of strides can read."""
    found = list(operands)
    for at in layout.copies:
        full = found[at].expand(layout.shape)
        found[at] = (full.movedim(-3, -1) if by_pixels else full).contiguous()
    return found
