"""Convolutions and their gradients as sums over filter taps, in float64 and by matmul alone.

Both convolutions are one relation between a coarse and a fine image: along each dimension, tap t
connects pixel i of the coarse one with pixel ``i * stride - padding + t * dilation`` of the fine
one. conv2d sums up the fine image, conv_transpose2d the coarse one, and the gradient of either
input is one more sum over the same connections. Pixels outside the fine image take no part, so that
an infinite weight does not meet the padding's zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Pair = tuple[int, int]
Connection = tuple[int, int, tuple[slice, slice], tuple[slice, slice]]  # tap, coarse, fine
_once: Callable[[Any], Any] = once_differentiable  # untyped


def _connected(
    coarse: int, fine: int, stride: int, padding: int, offset: int
) -> tuple[slice, slice] | None:
    """Pixels of both images along one dimension that the tap at `offset` connects."""
    first = max(-((offset - padding) // stride), 0)
    last = min((fine - 1 + padding - offset) // stride, coarse - 1)
    if last < first:
        return None
    start = first * stride - padding + offset
    return slice(first, last + 1), slice(start, start + (last - first) * stride + 1, stride)


@dataclass(frozen=True)
class Taps:
    """Settings of a convolution; `padding` is what lies above and left of the fine image.

    Tensors are (N, C, H, W) and weights as torch has them, both after any leading dimensions, which
    are taken one by one.
    """

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    transposed: bool

    def forward(self, x: Tensor, weight: Tensor, size: Pair) -> Tensor:
        """The convolution, `size` pixels high and wide."""
        return (self._scatter if self.transposed else self._gather)(x, weight, size)

    def of_input(self, grad: Tensor, weight: Tensor, size: Pair) -> Tensor:
        """Gradient of an x of `size` pixels."""
        return (self._gather if self.transposed else self._scatter)(grad, weight, size)

    def of_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """Gradient of weight."""
        coarse, fine = (x, grad) if self.transposed else (grad, x)
        rows, pixels = self._split(coarse), self._split(fine)
        shape = (*rows.shape[:-3], pixels.shape[-4], *self.kernel)
        made = rows.new_zeros(shape)
        for r, s, (i, j), (y, z) in self._connections(rows.shape[-2:], pixels.shape[-2:]):
            left, right = rows[..., i, j].flatten(-3), pixels[..., y, z].flatten(-3)
            made[..., r, s] = left @ right.mT
        return made.flatten(-5, -4)

    def _connections(self, coarse: Any, fine: Any) -> Iterator[Connection]:
        both = []
        for at in (0, 1):
            rest = (coarse[at], fine[at], self.stride[at], self.padding[at])
            offsets = [t * self.dilation[at] for t in range(self.kernel[at])]
            both.append([_connected(*rest, offset) for offset in offsets])
        for r, rows in enumerate(both[0]):
            for s, columns in enumerate(both[1]):
                if rows is not None and columns is not None:
                    yield r, s, (rows[0], columns[0]), (rows[1], columns[1])

    def _split(self, image: Tensor) -> Tensor:
        """(groups, C / groups, N, H, W) of it, so that matmul multiplies channels."""
        return torch.unflatten(image, -3, (self.groups, -1)).movedim(-5, -3)

    def _joined(self, image: Tensor) -> Tensor:
        return image.movedim(-3, -5).flatten(-4, -3)

    def _gather(self, fine: Tensor, weight: Tensor, size: Pair) -> Tensor:
        pixels, filters = self._split(fine), torch.unflatten(weight, -4, (self.groups, -1))
        made = pixels.new_zeros((*filters.shape[:-3], pixels.shape[-3], *size))
        for r, s, (i, j), (y, z) in self._connections(size, pixels.shape[-2:]):
            found = pixels[..., y, z]
            product = filters[..., r, s] @ found.flatten(-3)
            made[..., i, j] += product.reshape(*product.shape[:-1], *found.shape[-3:])
        return self._joined(made)

    def _scatter(self, coarse: Tensor, weight: Tensor, size: Pair) -> Tensor:
        pixels, filters = self._split(coarse), torch.unflatten(weight, -4, (self.groups, -1))
        lead = (*filters.shape[:-4], filters.shape[-3], pixels.shape[-3])
        made = pixels.new_zeros((*lead, *size))
        for r, s, (i, j), (y, z) in self._connections(pixels.shape[-2:], size):
            found = pixels[..., i, j]
            product = filters[..., r, s].mT @ found.flatten(-3)
            made[..., y, z] += product.reshape(*product.shape[:-1], *found.shape[-3:])
        return self._joined(made)


class Differentiable(torch.autograd.Function):
    """`Taps.forward` with its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, taps: Taps, size: Pair) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.taps = taps
        return taps.forward(x, weight, size)

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs, taps = ctx.needs_input_grad, ctx.taps
        of_x = taps.of_input(grad, weight, tuple(x.shape[-2:])) if needs[0] else None
        of_weight = taps.of_weight(grad, x) if needs[1] else None
        return of_x, of_weight, None, None
