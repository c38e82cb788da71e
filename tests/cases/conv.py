"""Convolutions: a cross product of settings, layouts and batches, shapes for kernels, bad calls."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse import support
from pycutfuse.ops import _conv, _conv_call, _conv_launch
from pycutfuse.testing import forcing

from .invalid import InvalidCase

# Dtypes and tiers that convolutions have kernels for.
KINDS = forcing.KINDS

Size = int | tuple[int, int]
LAYOUTS = ("contiguous", "channels_last", "weight_channels_last", "gapped", "permuted")


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """An equal (N, C, H, W) or (C, H, W) whose memory lies otherwise; gaps hold NaN."""
    if layout == "channels_last":
        return tensor.movedim(-3, -1).contiguous().movedim(-1, -3)
    if layout == "gapped":
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), float("nan"))
        made = wide[..., 1::2]
        return made.copy_(tensor)
    if layout == "permuted":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    return tensor.contiguous()


@dataclass(frozen=True)
class ConvCase:
    """One convolution, transposed or not. `batch` None: an unbatched image."""

    channels: int = 4
    out_channels: int = 6
    kernel: tuple[int, int] = (3, 2)
    size: tuple[int, int] = (9, 8)
    batch: int | None = 2
    bias: bool = True
    stride: Size = 1
    padding: Size | str = 0
    dilation: Size = 1
    groups: int = 1
    output_padding: Size = 0
    transposed: bool = False

    def __str__(self) -> str:
        kind = "t" if self.transposed else "c"
        text = f"{kind}{self.channels}x{self.out_channels}-k{self.kernel}-{self.size}-n{self.batch}"
        text += f"-s{self.stride}-p{self.padding}-d{self.dilation}-g{self.groups}"
        text += f"-o{self.output_padding}" * (self.output_padding != 0) + "-bias" * self.bias
        return text.replace(" ", "")

    def draw(
        self,
        make: Callable[..., Tensor],
        *,
        layout: str = "contiguous",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, weight and bias of ``make(shape, seed=...)``."""
        image = (self.channels, *self.size)
        x = make(image if self.batch is None else (self.batch, *image), seed=1)
        first, second = self.out_channels, self.channels // self.groups
        if self.transposed:
            first, second = self.channels, self.out_channels // self.groups
        weight = make((first, second, *self.kernel), seed=2)
        bias = make((self.out_channels,), seed=3) if self.bias else None
        x, weight = x.to(device, dtype), weight.to(device, dtype)
        bias = None if bias is None else bias.to(device, dtype)
        x = laid_out(x, "contiguous" if layout == "weight_channels_last" else layout)
        weight = laid_out(weight, layout.removeprefix("weight_"))
        return x, weight, bias

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of both functions."""
        found = {"stride": self.stride, "padding": self.padding}
        found |= {"dilation": self.dilation, "groups": self.groups}
        return found | ({"output_padding": self.output_padding} if self.transposed else {})

    def ours(self, *tensors: Tensor | None, **options: Any) -> Tensor:
        function = pcf.ops.conv_transpose2d if self.transposed else pcf.ops.conv2d
        return function(*tensors, **self.options, **options)

    def problem(self, kind: forcing.Kind) -> support.ConvProblem:
        """What the library is asked, on device 0; no tensor is made."""
        dtype, tier = kind
        tensors = self.draw(
            lambda shape, seed: torch.empty(shape, device="meta"), device="meta", dtype=dtype
        )
        prepare = _conv.prepare_conv_transpose2d if self.transposed else _conv.prepare_conv2d
        call = prepare(*tensors, **self.options)
        made = _conv_launch._problem(call, _conv_call.check(call), tier, channels_last=False)
        return made._replace(ordinal=0)

    def theirs(self, *tensors: Tensor | None) -> Tensor:
        function = F.conv_transpose2d if self.transposed else F.conv2d
        return function(*tensors, **self.options)

    def module(self, namespace: Any, **options: Any) -> torch.nn.Module:
        """``namespace.Conv2d`` or ConvTranspose2d with these settings."""
        kind = namespace.ConvTranspose2d if self.transposed else namespace.Conv2d
        given = (self.channels, self.out_channels, self.kernel)
        return kind(*given, bias=self.bias, **self.options, **options)


def _plain() -> list[ConvCase]:
    sides = product((True, False), (1, 2, (2, 1)), (0, (1, 2), "same", "valid"), (1, 2), (1, 2))
    return [
        ConvCase(bias=bias, stride=stride, padding=padding, dilation=dilation, groups=groups)
        for bias, stride, padding, dilation, groups in sides
        if stride == 1 or padding != "same"
    ]


def _transposed() -> list[ConvCase]:
    sides = product((True, False), (1, 2, (2, 3)), (0, (1, 2)), (1, 2), (1, 2), (0, 1, (0, 1)))
    return [
        ConvCase(
            bias=bias,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            output_padding=extra,
            transposed=True,
        )
        for bias, stride, padding, dilation, groups, extra in sides
        if extra == 0 or (stride, dilation) != (1, 1)
    ]


GRID = _plain() + _transposed()
# Each setting once and all of them together: for tests that cost more.
FEW = [
    ConvCase(),
    ConvCase(padding="same", bias=False),
    ConvCase(stride=2, padding=1, dilation=2, groups=2),
    ConvCase(batch=None, padding=(1, 2)),
    ConvCase(transposed=True, bias=False),
    ConvCase(transposed=True, stride=2, padding=1, output_padding=1, dilation=2, groups=2),
    ConvCase(transposed=True, batch=None, dilation=3, output_padding=2),
]


def batches(case: ConvCase) -> list[ConvCase]:
    """The case batched, unbatched and with no image."""
    return [replace(case, batch=batch) for batch in (2, None, 0)]


# For kernels: the founding problems made small, ragged images, primes, filters of one pixel, one
# channel, strides beside kernels, wide reductions, results of one pixel.
# tests/cpp/test_conv_cases.py asks the library whether it takes them.
KERNEL = [
    ConvCase(3, 96, (11, 11), (64, 61), 3, stride=4, padding=2),
    ConvCase(3, 64, (7, 7), (57, 53), 2, stride=2, padding=3),
    ConvCase(8, 64, (3, 3), (34, 130), 3),
    ConvCase(8, 64, (3, 3), (31, 37), 5, padding=1, bias=False),
    ConvCase(16, 40, (5, 3), (29, 71), 2, padding=(2, 1)),
    ConvCase(64, 64, (3, 3), (28, 28), 2, padding="same"),
    ConvCase(32, 256, (1, 1), (33, 65), 2),
    ConvCase(72, 96, (1, 1), (9, 12), 3),
    ConvCase(13, 17, (3, 3), (19, 23), 1, stride=3, padding=1),
    ConvCase(1, 16, (4, 4), (32, 32), 7, padding="same"),
    ConvCase(32, 32, (3, 3), (40, 41), 2, groups=4, padding=1),
    ConvCase(24, 48, (3, 3), (40, 41), 2, dilation=2, padding=2),
    ConvCase(32, 32, (3, 3), (24, 130), 2, transposed=True, bias=False),
    ConvCase(32, 32, (3, 3), (17, 19), 3, transposed=True, padding=1),
    ConvCase(32, 32, (3, 3), (20, 21), 2, transposed=True, groups=2, dilation=2),
    ConvCase(12, 24, (8, 8), (19, 13), 17),
    ConvCase(24, 40, (3, 3), (3, 3), 130),
    # Read in pieces: rows of whole multiples of 16 bytes.
    ConvCase(8, 64, (3, 3), (37, 128), 3),
    ConvCase(24, 40, (3, 5), (31, 96), 2, padding=(2, 1)),
    ConvCase(3, 96, (11, 11), (67, 224), 2, stride=4, padding=2),
    ConvCase(3, 24, (7, 7), (37, 96), 2, stride=2, padding=3),
    ConvCase(16, 48, (3, 3), (27, 128), 2, stride=2, padding=1),
    ConvCase(24, 40, (4, 3), (19, 128), 2, stride=2, dilation=2),
    ConvCase(9, 20, (2, 4), (17, 96), 1, stride=(3, 2), padding=(1, 2), dilation=(3, 4)),
    # Results that are interleaved.
    ConvCase(32, 24, (4, 4), (16, 33), 2, transposed=True, stride=2, padding=1),
    ConvCase(32, 24, (3, 3), (13, 17), 2, transposed=True, stride=2, padding=1, output_padding=1),
    ConvCase(40, 16, (5, 5), (11, 29), 1, transposed=True, stride=3, padding=2),
    ConvCase(64, 6, (2, 2), (19, 31), 3, transposed=True, stride=2, groups=2),
    ConvCase(32, 5, (3, 2), (15, 40), 2, transposed=True, stride=(1, 4), padding=(1, 0)),
    ConvCase(32, 40, (3, 5), (9, 70), 2, transposed=True, stride=(4, 2), padding=(2, 4)),
]

# Sums of few channels, for the patch kernels: rows of x are multiples of 4.
PATCHES = [
    ConvCase(3, 96, (11, 11), (60, 64), 3, stride=4, padding=2),
    ConvCase(3, 96, (4, 4), (56, 36), 5, stride=4),
    ConvCase(16, 20, (3, 5), (21, 28), 2, padding=2, dilation=2),
    ConvCase(5, 33, (5, 4), (37, 44), None, stride=(2, 3), padding=(2, 1)),
    ConvCase(32, 32, (3, 3), (11, 140), 2, transposed=True, bias=False),
    ConvCase(64, 64, (1, 1), (17, 20), 1),
    ConvCase(7, 70, (7, 7), (19, 24), 2, stride=2, padding=3),
    ConvCase(6, 5, (3, 3), (8, 12), 3, transposed=True, padding=(0, 2), dilation=2),
    ConvCase(3, 77, (10, 10), (53, 99), 3, stride=3, padding=1),
    ConvCase(7, 50, (5, 5), (23, 13), None, stride=2, padding=3, bias=False),
    ConvCase(9, 64, (3, 3), (14, 14), 5, padding=2, dilation=2),
    # Blocks of two shapes.
    ConvCase(3, 40, (7, 7), (19, 110), 2, stride=2, padding=3),
    ConvCase(6, 20, (3, 3), (13, 56), 3, padding=1),
]
# What no kernel takes: of 8 channels a group and more, results of one pixel and the longest sums
# in several groups, and transposed convolutions with strides and dilation.
HANDED_OVER = [
    ConvCase(32, 16, (3, 3), (3, 3), 128, groups=2),
    ConvCase(16, 24, (3, 3), (13, 17), 2, transposed=True, stride=2, dilation=2),
    ConvCase(2048, 16, (5, 5), (9, 9), 2, groups=2),
]


def _t(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, device=device, dtype=dtype)


def _bad(
    name: str,
    *words: str,
    x: Any = (2, 4, 5, 6),
    weight: Any = None,
    transposed: bool = False,
    bias: Any = None,
    **options: Any,
) -> InvalidCase:
    shape = weight or ((4, 6, 3, 3) if transposed else (6, 4, 3, 3))
    theirs = F.conv_transpose2d if transposed else F.conv2d
    ours = pcf.ops.conv_transpose2d if transposed else pcf.ops.conv2d

    def given(d: torch.device) -> list[Any]:
        tensors = (x, shape, bias)
        return [one(d) if callable(one) else one and _t(*one, device=d) for one in tensors]

    return InvalidCase(
        name, lambda d: ours(*given(d), **options), lambda d: theirs(*given(d), **options), words
    )


INVALID = [
    _bad("kernel_too_large", "output", "0 pixels high", "at least 1", x=(2, 4, 2, 6)),
    _bad("x_2d", "2 dimensions", "(N, C, H, W)", x=(5, 6)),
    _bad("weight_3d", "weight has 3 dimensions", weight=(6, 4, 3)),
    _bad("channels", "x has 3 channels", "takes 4", "equal", x=(2, 3, 5, 6)),
    _bad("groups_do_not_divide", "groups=4", "multiple", groups=4, x=(2, 16, 5, 6)),
    _bad("groups_zero", "groups is 0", "at least 1", groups=0),
    _bad("groups_channels", "x has 4 channels", "takes 8", groups=2),
    _bad("stride_zero", "stride is 0", "at least 1", stride=0),
    _bad("stride_negative", "stride is -1", "at least 1", stride=(1, -1)),
    _bad("padding_negative", "padding is -1", "at least 0", padding=-1),
    _bad("dilation_zero", "dilation is 0", "at least 1", dilation=0),
    _bad("dilation_too_large", "pixels high", dilation=3),
    _bad("stride_length", "stride has 3 values", "two", stride=(1, 1, 1)),
    _bad("stride_float", "stride is a float", stride=1.5),
    _bad("padding_float", "padding holds a float", padding=(1, 0.5)),
    _bad("padding_word", "'half'", "'same'", padding="half"),
    _bad("same_with_stride", "stride 1", "(2, 2)", padding="same", stride=2),
    _bad("bias_size", "(5,)", "(6,)", bias=(5,)),
    _bad("bias_2d", "(6, 1)", "(6,)", bias=(6, 1)),
    _bad("list", "list", "Tensor", x=lambda d: [1.0]),
    _bad("weight_number", "float", "Tensor", weight=lambda d: 1.0),
    _bad("bias_number", "float", "Tensor", bias=lambda d: 1.0),
    _bad("bias_dtype", "bias", "float64", bias=lambda d: _t(6, device=d, dtype=torch.float64)),
    _bad("dtype", "float64", ".to(", x=lambda d: _t(2, 4, 5, 6, device=d, dtype=torch.float64)),
    _bad("transposed_channels", "x has 3 channels", "takes 4", x=(2, 3, 5, 6), transposed=True),
    _bad("transposed_groups", "groups=3", "multiple", groups=3, transposed=True),
    _bad("transposed_bias", "(4,)", "(6,)", bias=(4,), transposed=True),
    _bad("transposed_empty", "-1 pixels high", padding=4, transposed=True),
    _bad("transposed_same", "padding is a str", padding="same", transposed=True),
    _bad(
        "output_padding",
        "output_padding is 2",
        "stride 2",
        output_padding=2,
        stride=2,
        transposed=True,
    ),
    _bad(
        "output_padding_negative",
        "output_padding is -1",
        output_padding=-1,
        stride=2,
        transposed=True,
    ),
]
