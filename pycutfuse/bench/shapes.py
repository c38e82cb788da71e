"""Shapes of the benchmark's problems: of linear layers, and of convolutions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """A linear problem: `m` rows of `k` features to `n` features, and to `last` if that is set."""

    m: int
    k: int
    n: int
    last: int | None = None

    def __str__(self) -> str:
        return f"{self.m}x{'-'.join(map(str, self.sizes[1:]))}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows, then the features before, between and after the layers."""
        return (self.m, self.k, self.n) + (() if self.last is None else (self.last,))

    @property
    def input_size(self) -> tuple[int, ...]:
        """Of x."""
        return (self.m, self.k)

    @property
    def output_size(self) -> tuple[int, ...]:
        """Of the last layer's result."""
        return (self.m, self.sizes[-1])

    @property
    def contractions(self) -> list[tuple[int, int, int]]:
        """(m, n, k) of each layer; its operands may be stored as fp16 planes."""
        features = self.sizes[1:]
        return [(self.m, n, k) for k, n in pairwise(features)]

    @property
    def flop(self) -> int:
        """2·M·N·K of all layers."""
        return sum(2 * m * n * k for m, n, k in self.contractions)

    def laid_out(self, x: Tensor) -> Tensor:
        """`x` in the memory format of the case."""
        return x

    def reduced(self, divisor: int = 32) -> Shape:
        """The shape that the reference path runs at where there is no GPU."""
        return Shape(*(max(2, size // divisor) for size in self.sizes))


@dataclass(frozen=True)
class ConvShape:
    """A convolution of square filters: `batch` images of `channels`·`height`·`width`.

    Attributes
    ----------
    kernel, stride, padding, dilation, output_padding : int
        In both directions; output_padding is a transposed convolution's.
    groups : int
    transposed : bool
        Of torch.nn.ConvTranspose2d.
    channels_last : bool
        Memory format of the input and of the weight.
    """

    batch: int
    channels: int
    height: int
    width: int
    out_channels: int
    kernel: int
    stride: int = 1
    padding: int = 0
    transposed: bool = False
    channels_last: bool = False
    dilation: int = 1
    groups: int = 1
    output_padding: int = 0

    def __str__(self) -> str:
        """Sizes, then what differs from its default: results of plain shapes are stored by these.

        Examples
        --------
        >>> str(ConvShape(8, 6, 9, 9, 12, kernel=3)), str(ConvShape(8, 6, 9, 9, 12, 3, dilation=2))
        ('8x6x9x9-12k3s1p0', '8x6x9x9-12k3s1p0d2')
        """
        image = "x".join(map(str, self.input_size))
        text = f"{image}-{self.out_channels}k{self.kernel}s{self.stride}p{self.padding}"
        text += f"d{self.dilation}" if self.dilation > 1 else ""
        text += f"g{self.groups}" if self.groups > 1 else ""
        return text + (f"o{self.output_padding}" if self.output_padding else "")

    @property
    def input_size(self) -> tuple[int, int, int, int]:
        """(N, C, H, W)."""
        return self.batch, self.channels, self.height, self.width

    @property
    def output_size(self) -> tuple[int, int, int, int]:
        """(N, K, P, Q).

        Examples
        --------
        >>> ConvShape(256, 3, 224, 224, 96, kernel=11, stride=4, padding=2).output_size
        (256, 96, 55, 55)
        >>> ConvShape(8, 32, 512, 1024, 32, kernel=3, transposed=True).output_size
        (8, 32, 514, 1026)
        """
        return self.batch, self.out_channels, self._made(self.height), self._made(self.width)

    def _made(self, size: int) -> int:
        rest = self.reach - 2 * self.padding
        if self.transposed:
            return (size - 1) * self.stride + rest + self.output_padding
        return (size - rest) // self.stride + 1

    @property
    def reach(self) -> int:
        """Pixels from the filter's first tap to its last, both included."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def columns(self) -> int:
        """Values that the filter meets in an image, which PyTorch gathers to convolve in float64.

        Examples
        --------
        >>> ConvShape(8, 3, 9, 9, 16, kernel=3).columns
        1323
        """
        size = self.input_size if self.transposed else self.output_size
        channels = self.out_channels if self.transposed else self.channels
        return channels // self.groups * self.kernel**2 * size[2] * size[3]

    @property
    def contractions(self) -> list[tuple[int, int, int]]:
        """None: no operand is stored as planes."""
        return []

    @property
    def flop(self) -> int:
        """Two for each product of a filter's tap."""
        size = self.input_size if self.transposed else self.output_size
        pixels = size[0] * size[2] * size[3]
        return 2 * pixels * self.channels * self.out_channels // self.groups * self.kernel**2

    def laid_out(self, x: Tensor) -> Tensor:
        """`x` in the memory format of the case."""
        return x.contiguous(memory_format=self.memory_format)

    @property
    def memory_format(self) -> torch.memory_format:
        """Of the input and of the weight."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def reduced(self, divisor: int = 8) -> ConvShape:
        """The shape that the reference path runs at where there is no GPU: fewer, smaller images.

        Examples
        --------
        >>> str(ConvShape(256, 3, 224, 224, 96, kernel=11, stride=4, padding=2).reduced())
        '2x3x28x28-96k11s4p2'
        """
        height, width = (max(self.reach, size // divisor) for size in (self.height, self.width))
        return replace(self, batch=min(2, self.batch), height=height, width=width)
