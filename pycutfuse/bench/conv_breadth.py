"""Random convolutions and transposed convolutions of every kind, bounded in bytes and in time."""

from __future__ import annotations

import math
import random
from typing import Any

from torch import nn

from pycutfuse import nn as fused_nn
from pycutfuse.bench.case import Case, SizesCase
from pycutfuse.bench.shapes import ConvShape

COLUMNS = 4
FLOP = 8000
"""Most columns of an image, and operations, for each element that a tensor may have. Of 2^26
elements, 256 MiB of floats, that is 2 GiB of columns in the float64 that verifies, and 5e11
operations: 2 ms of PyTorch at TF32's rate, 10 ms at fp32's, half a second at 1 TFLOP/s."""


def breadth(case: SizesCase) -> list[Case]:
    """The problems of a case, in order."""
    return [
        Case(named(shape), shape, False, "convolution with bias", _module, _fuse)
        for shape in random_breadth(case)
    ]


def named(shape: ConvShape) -> str:
    """Sizes of a convolution where transposed ones stand beside others.

    Examples
    --------
    >>> named(ConvShape(8, 32, 512, 1024, 32, kernel=3, transposed=True))
    'transposed 8x32x512x1024-32k3s1p0'
    """
    return f"transposed {shape}" if shape.transposed else str(shape)


def random_breadth(case: SizesCase) -> list[ConvShape]:
    """The convolutions of a case: the same for the same seed.

    Every third is transposed. As of `random_convolutions`, batch 1-128 and channels 1-512 are
    log-uniform; channels of the result 1-512, image sides 7-256, filters 1-11, strides 1-4,
    dilations 1-2 and padding up to half a filter's reach are uniform. One in four has groups: 2, 4,
    8, 16 or 32, of which channels are multiples then, or one for each channel of x. Half of the
    transposed ones draw an output padding. What is too large, or without a result, is drawn again.

    Examples
    --------
    >>> case = SizesCase("conv_breadth", 2, 2**26, compiled=0, family="conv_breadth")
    >>> [named(shape) for shape in random_breadth(case)]
    ['10x9x221x177-120k4s2p1', '2x18x250x239-408k9s1p1d2']
    """
    generator = random.Random(f"breadth {case.seed}")
    found: list[ConvShape] = []
    while len(found) < case.count:
        shape = _draw(generator, transposed=len(found) % 3 == 2)
        elements = max(math.prod(shape.input_size), math.prod(shape.output_size))
        fits = elements <= case.largest and shape.columns <= COLUMNS * case.largest
        if min(shape.output_size) > 0 and fits and shape.flop <= FLOP * case.largest:
            found.append(shape)
    return found


def _draw(generator: random.Random, *, transposed: bool) -> ConvShape:
    def log_uniform(most: int) -> int:
        return round(math.exp(generator.uniform(0, math.log(most))))

    batch, channels, features = log_uniform(128), log_uniform(512), generator.randint(1, 512)
    height, width = generator.randint(7, 256), generator.randint(7, 256)
    kernel, stride = generator.randint(1, 11), generator.randint(1, 4)
    dilation = generator.randint(1, 2)
    groups = 1
    if generator.random() < 0.25:
        groups = generator.choice((2, 4, 8, 16, 32, channels))
        channels, features = (max(size // groups, 1) * groups for size in (channels, features))
    output_padding = 0
    if transposed and generator.random() < 0.5:
        output_padding = generator.randint(0, max(stride, dilation) - 1)
    return ConvShape(
        *(batch, channels, height, width, features),
        *(kernel, stride, generator.randint(0, ((kernel - 1) * dilation + 1) // 2)),
        transposed=transposed,
        dilation=dilation,
        groups=groups,
        output_padding=output_padding,
    )


def _module(shape: ConvShape) -> nn.Module:
    made: Any = nn.ConvTranspose2d if shape.transposed else nn.Conv2d
    options = {"dilation": shape.dilation, "groups": shape.groups}
    if shape.transposed:
        options["output_padding"] = shape.output_padding
    given = (shape.channels, shape.out_channels, shape.kernel, shape.stride, shape.padding)
    module: nn.Module = made(*given, **options)
    return module


def _fuse(reference: nn.Module) -> nn.Module:
    if isinstance(reference, nn.ConvTranspose2d):
        return fused_nn.ConvTranspose2d.from_torch(reference)
    assert isinstance(reference, nn.Conv2d)
    return fused_nn.Conv2d.from_torch(reference)
