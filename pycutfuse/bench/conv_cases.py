"""Benchmark cases of convolutions: the founding problems, and random shapes."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from pycutfuse import nn as fused_nn
from pycutfuse import program as steps
from pycutfuse.bench.case import Case, SizesCase
from pycutfuse.bench.shapes import ConvShape

CONV2D = ConvShape(256, 3, 224, 224, 96, kernel=11, stride=4, padding=2)
CONV_TRANSPOSE2D = ConvShape(8, 32, 512, 1024, 32, kernel=3, transposed=True)
BATCH_NORM = ConvShape(128, 8, 128, 128, 64, kernel=3)

GIGABYTE_OF_FLOATS = 1_000_000_000 // 4
MOST_ELEMENTS = 2**26
"""Of a tensor of `pycutfuse.bench.conv_breadth`."""


class Conv2dBatchNormScale(nn.Module):
    """Founding problem 4: bn(conv(x)) * 2."""

    def __init__(self, shape: ConvShape) -> None:
        super().__init__()
        self.conv = _conv2d(shape)
        self.bn = nn.BatchNorm2d(shape.out_channels)
        self.scaling_factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, K, P, Q)."""
        result: Tensor = self.bn(self.conv(x)) * self.scaling_factor
        return result


class ConvBatchNormRelu(nn.Module):
    """A convolution of a ResNet: relu(bn(conv(x)))."""

    def __init__(self, shape: ConvShape) -> None:
        super().__init__()
        given = (shape.channels, shape.out_channels, shape.kernel, shape.stride, shape.padding)
        self.conv = nn.Conv2d(*given, bias=False)
        self.bn = nn.BatchNorm2d(shape.out_channels)
        self.scaling_factor = 1.0  # of the module that replaces it
        _formatted(self.conv, shape)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, K, P, Q)."""
        return F.relu(self.bn(self.conv(x)))


def _conv2d(shape: ConvShape) -> nn.Module:
    given = (shape.channels, shape.out_channels, shape.kernel, shape.stride, shape.padding)
    return _formatted(nn.Conv2d(*given), shape)


def _conv_transpose2d(shape: ConvShape) -> nn.Module:
    given = (shape.channels, shape.out_channels, shape.kernel, shape.stride, shape.padding)
    return _formatted(nn.ConvTranspose2d(*given, bias=False), shape)


def _formatted(module: nn.Module, shape: ConvShape) -> nn.Module:
    untyped: Any = module  # to() has no stub for memory_format alone
    untyped.to(memory_format=shape.memory_format)
    return module


def _fuse_conv2d(reference: nn.Module) -> nn.Module:
    assert isinstance(reference, nn.Conv2d)
    return fused_nn.Conv2d.from_torch(reference)


def _fuse_conv_transpose2d(reference: nn.Module) -> nn.Module:
    assert isinstance(reference, nn.ConvTranspose2d)
    return fused_nn.ConvTranspose2d.from_torch(reference)


def _fuse_batch_norm(reference: nn.Module) -> nn.Module:
    # A copy, as training changes the running statistics; it keeps the weight's memory format.
    return fused_nn.Conv2dBatchNorm2dScale.from_torch(copy.deepcopy(reference))


def _fuse_batch_norm_relu(reference: nn.Module) -> nn.Module:
    return fused_nn.Conv2dBatchNorm2dScale.from_torch(reference, epilogue=(steps.relu(),))


def conv2d(name: str, shape: ConvShape) -> Case:
    """Conv2d with a bias and nothing after it."""
    return Case(name, shape, False, "Conv2d", _conv2d, _fuse_conv2d)


def _founding() -> tuple[Case, ...]:
    chain = "Conv2d, BatchNorm2d, mul(2)"
    name = "conv2d_batch_norm_scale"
    parts = (BATCH_NORM, True, chain, Conv2dBatchNormScale, _fuse_batch_norm)
    train = Case(f"{name}_train", *parts)
    transposed = (CONV_TRANSPOSE2D, False, "ConvTranspose2d without bias", _conv_transpose2d)
    return (
        conv2d("conv2d", CONV2D),
        Case("conv_transpose2d", *transposed, _fuse_conv_transpose2d),
        train,
        replace(train, name=f"{name}_eval", training=False),
    )


def _channels_last(case: Case) -> Case:
    assert isinstance(case.shape, ConvShape)
    shape = replace(case.shape, channels_last=True)
    chain = f"{case.chain}, channels_last"
    return replace(case, name=f"{case.name}_channels_last", shape=shape, chain=chain)


CONV_CASES: tuple[Case | SizesCase, ...] = (
    *_founding(),
    *(_channels_last(case) for case in _founding()),
    SizesCase("conv_sizes", 24, GIGABYTE_OF_FLOATS, compiled=0, family="conv2d"),
    SizesCase("conv_breadth", 60, MOST_ELEMENTS, compiled=0, family="conv_breadth"),
    SizesCase("resnet50", 23, 64, compiled=0, family="resnet50"),
    SizesCase("resnet50_channels_last", 23, 64, compiled=0, family="resnet50", channels_last=True),
)

# Channels, side of the image, channels of the result, filter and stride of each that is distinct.
RESNET50 = (
    (3, 224, 64, 7, 2),
    *((64, 56, 64, 1, 1), (64, 56, 64, 3, 1), (64, 56, 256, 1, 1), (256, 56, 64, 1, 1)),
    *((256, 56, 128, 1, 1), (128, 56, 128, 3, 2), (128, 28, 512, 1, 1), (256, 56, 512, 1, 2)),
    *((512, 28, 128, 1, 1), (128, 28, 128, 3, 1)),
    *((512, 28, 256, 1, 1), (256, 28, 256, 3, 2), (256, 14, 1024, 1, 1), (512, 28, 1024, 1, 2)),
    *((1024, 14, 256, 1, 1), (256, 14, 256, 3, 1)),
    *((1024, 14, 512, 1, 1), (512, 14, 512, 3, 2), (512, 7, 2048, 1, 1), (1024, 14, 2048, 1, 2)),
    *((2048, 7, 512, 1, 1), (512, 7, 512, 3, 1)),
)


def resnet50(case: SizesCase) -> list[Case]:
    """The first `count` distinct convolutions of ResNet-50, with batch norm in eval and relu."""
    found = []
    for channels, side, features, kernel, stride in RESNET50[: case.count]:
        sizes = (case.largest, channels, side, side, features)
        shape = ConvShape(*sizes, kernel, stride, kernel // 2, channels_last=case.channels_last)
        chain = "Conv2d, BatchNorm2d, relu"
        parts = (shape, False, chain, ConvBatchNormRelu, _fuse_batch_norm_relu)
        found.append(Case(str(shape), *parts))
    return found


def random_convolutions(case: SizesCase) -> list[ConvShape]:
    """The convolutions of a case: the same for the same seed.

    Batch 1-128 and channels 1-64 are log-uniform, channels of the result 16-256, image sides 7-399,
    filters 1-11, strides 1-4 and padding up to half a filter uniform. Image sides are odd, about
    half of them prime. A draw whose input or result is too large is drawn again.

    Examples
    --------
    >>> case = SizesCase("conv_sizes", 2, 2**28, compiled=0, family="conv2d")
    >>> [str(shape) for shape in random_convolutions(case)]
    ['40x6x139x251-216k7s3p3', '17x44x263x77-174k6s3p1']
    """
    generator = random.Random(case.seed)
    found: list[ConvShape] = []
    while len(found) < case.count:
        shape = _draw(generator)
        elements = max(math.prod(shape.input_size), math.prod(shape.output_size))
        if min(shape.output_size) > 0 and elements <= case.largest:
            found.append(shape)
    return found


def _draw(generator: random.Random) -> ConvShape:
    def log_uniform(most: int) -> int:
        return round(math.exp(generator.uniform(0, math.log(most))))

    def side() -> int:
        size, prime = generator.randrange(7, 400, 2), generator.random() < 0.5
        while prime and not _is_prime(size):
            size -= 2
        return size

    kernel = generator.randint(1, 11)
    return ConvShape(
        batch=log_uniform(128),
        channels=log_uniform(64),
        height=side(),
        width=side(),
        out_channels=generator.randint(16, 256),
        kernel=kernel,
        stride=generator.randint(1, 4),
        padding=generator.randint(0, kernel // 2),
    )


def _is_prime(number: int) -> bool:
    return all(number % other for other in range(2, math.isqrt(number) + 1))
