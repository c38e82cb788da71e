"""Configurations of the convolution family, drawn from one integer."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace
from typing import ClassVar

from pycutfuse.program import MAX_STEPS
from pycutfuse.testing.repro.config import Config
from pycutfuse.testing.repro.drawing import (
    HALF,
    draw_bias,
    draw_dtype,
    draw_fill,
    draw_handling,
    draw_program,
    finish,
)
from pycutfuse.testing.repro.steps import StepRecipe, draw_operand
from pycutfuse.testing.repro.tails import BatchNorm
from pycutfuse.testing.repro.taps import Pair, Taps
from pycutfuse.testing.repro.tensors import IMAGE_LAYOUTS, TensorRecipe, draw_layout

BATCHES = (0, 1, 1, 1, 2, 2, 2, 3, 4, 5, 8, 17)
CHANNELS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 70)
RICH = (16, 40, 64, 72, 96, 104, 128, 136, 192, 256)  # what is read in whole vectors
OUT_CHANNELS = (*CHANNELS, 79, 95, 96, 97, 127, 128, 129, 160, 191, 192, 193, 200)
GROUPS = (2, 2, 3, 4, 8, 16)
KERNELS = (1, 1, 2, 3, 3, 3, 3, 4, 5, 5, 6, 7, 8, 9, 11)
IMAGE = (
    *(1, 2, 3, 5, 7, 8, 9, 11, 13, 15, 16, 17, 19, 23, 29, 31, 32, 33, 37, 41, 43, 47, 53, 59),
    *(61, 63, 64, 65, 67, 69, 70),
)
WIDE = (127, 128, 129, 193, 255, 257, 333, 383, 512, 513, 521, 599, 600)
ELEMENTS = 2**23  # of x, and of the output
FILLS = {
    "randn": 30,
    "rand": 22,
    "lognormal": 14,
    "rows": 5,
    "planes": 5,
    "images": 5,
    "wide": 5,
    "zero_rows": 4,
    "zeros": 1,
}
SCALED = ("rows", "planes", "images", "wide")
# Of calls that are drawn so that it can run them, though others may as well: products of pixels as
# they lie, of pixels that are gathered, and of planes as they lie.
MECHANISMS = {None: 36, "pixels": 24, "images": 30, "planes": 10}
EVEN = (2, 4, 6, 8, 10, 14, 16, 22, 28, 40)  # sides of planes that are
_PATIENCE = 100  # sizes that are tried before the filter becomes a pixel
PADDING_MODES = ("reflect", "replicate", "circular")


@dataclass(frozen=True)
class ConvConfig(Config):
    """One call: ``after(tail(program(conv(x, weight) + bias)))``.

    Attributes
    ----------
    transposed : bool
        conv_transpose2d, else conv2d. Other attributes as torch has them, or as `Config`.
    sized : bool
        The module's forward is told the output's size in place of the output padding.
    """

    transposed: bool = False
    stride: int | Pair = 1
    padding: int | Pair | str = 0
    dilation: int | Pair = 1
    groups: int = 1
    output_padding: int | Pair = 0
    padding_mode: str = "zeros"
    sized: bool = False

    pixel_dims: ClassVar[int] = 2

    @property
    def kernel(self) -> Pair:
        """Height and width of the filter."""
        return self.weight.shape[2], self.weight.shape[3]

    @property
    def n(self) -> int:
        """Channels of the result."""
        first, second = self.weight.shape[:2]
        return second * self.groups if self.transposed else first

    @property
    def k(self) -> int:
        """Products that make one value of it, at most."""
        return self.x.shape[-3] // self.groups * math.prod(self.kernel)

    @property
    def work(self) -> int:
        """Multiplications."""
        if self.transposed:
            return math.prod(self.x.shape) * math.prod(self.weight.shape[1:])
        return math.prod(self.value_shape) * self.k

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Shape of the convolution's result."""
        return (*self.x.shape[:-3], self.n, *self.size)

    @property
    def size(self) -> Pair:
        """Height and width of the result."""
        if self.padding == "same":
            return self.x.shape[-2], self.x.shape[-1]
        padding, taps = both(0 if self.padding == "valid" else self.padding), self.taps
        made = []
        for at, pixels in enumerate(self.x.shape[-2:]):
            reach, stride = taps.dilation[at] * (self.kernel[at] - 1) + 1, taps.stride[at]
            if self.transposed:
                extra = both(self.output_padding)[at]
                made.append((pixels - 1) * stride + reach - 2 * padding[at] + extra)
            else:
                made.append((pixels + 2 * padding[at] - reach) // stride + 1)
        return made[0], made[1]

    @property
    def taps(self) -> Taps:
        """How pixels are connected, x being padded already where the mode is not "zeros"."""
        dilation = both(self.dilation)
        if self.padding == "same":
            padding = [d * (size - 1) // 2 for d, size in zip(dilation, self.kernel, strict=True)]
        else:
            padding = list(both(0 if self.padding == "valid" else self.padding))
        if self.padding_mode != "zeros":
            padding = [0, 0]
        above, left = padding
        rest = (dilation, self.groups, self.transposed)
        return Taps(self.kernel, both(self.stride), (above, left), *rest)


def both(value: int | Pair | str) -> Pair:
    """`value` for both dimensions."""
    if isinstance(value, str):
        raise TypeError(f"{value!r} is no number")
    return (value, value) if isinstance(value, int) else value


def _pair(rng: random.Random, pool: tuple[int, ...]) -> Pair:
    first = rng.choice(pool)
    return first, first if rng.random() < 0.7 else rng.choice(pool)


def _short(value: Pair, rng: random.Random) -> int | Pair:
    return value[0] if value[0] == value[1] and rng.random() < 0.7 else value


@dataclass
class _Sizes:
    """Settings, and the sizes that are made smaller until a call is small enough."""

    batch: int
    height: int
    width: int
    channels: int  # of one group, as out_channels
    out_channels: int
    groups: int
    kernel: Pair
    transposed: bool
    stride: int | Pair
    padding: int | Pair | str
    dilation: int | Pair
    output_padding: int | Pair = 0

    @classmethod
    def draw(cls, rng: random.Random, transposed: bool) -> _Sizes:
        channels, out_channels, groups = rng.choice(CHANNELS), rng.choice(OUT_CHANNELS), 1
        kind = rng.random()
        if kind < 0.06:  # depthwise
            groups, channels, out_channels = channels, 1, rng.choice((1, 1, 2, 3))
        elif kind < 0.24:
            groups = rng.choice(GROUPS)
            channels, out_channels = -(-channels // groups), -(-out_channels // groups)
        height, width = rng.choice(IMAGE), rng.choice(IMAGE)
        if rng.random() < 0.08:
            height, width = min(height, 17), rng.choice(WIDE)
        head = (rng.choice(BATCHES), height, width, channels, out_channels, groups)
        kernel, stride = _pair(rng, KERNELS), _pair(rng, (1, 1, 1, 1, 2, 2, 3, 4))
        dilation = _pair(rng, (1, 1, 1, 1, 1, 2, 3))
        given = _padding(rng, transposed, kernel, stride)
        padding = given if isinstance(given, str) else _short(given, rng)
        made = cls(*head, kernel, transposed, _short(stride, rng), padding, _short(dilation, rng))
        if transposed and rng.random() < 0.5:
            most = [max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]
            made.output_padding = _short((rng.randint(0, most[0]), rng.randint(0, most[1])), rng)
        return made

    def suit(self, rng: random.Random, mechanism: str | None) -> None:
        """Change what one of `MECHANISMS` does not take."""
        if mechanism is None:
            return
        self.channels = rng.choice((self.channels * self.groups, *RICH))
        self.out_channels, self.groups = self.out_channels * self.groups, 1
        if self.transposed or mechanism != "images":
            self.stride, self.output_padding = 1, 0
        if mechanism != "images":
            self.kernel, self.padding = (1, 1), rng.choice((0, (0, 0)))
        if mechanism == "planes":
            self.channels = rng.choice(RICH[2:])
            self.height, self.width = rng.choice(EVEN), rng.choice(EVEN)

    def config(self) -> ConvConfig:
        """A call of these sizes and no more."""
        inner, outer = self.groups * self.channels, self.groups * self.out_channels
        first, second = (inner, self.out_channels) if self.transposed else (outer, self.channels)
        return ConvConfig(
            0,
            TensorRecipe((self.batch, inner, self.height, self.width)),
            TensorRecipe((first, second, *self.kernel)),
            transposed=self.transposed,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            output_padding=self.output_padding,
        )

    def fit(self, rng: random.Random, limit: int) -> None:
        """Change sizes until there is a result, with at most `limit` multiplications."""
        for turn in itertools.count():
            config = self.config()
            while min(config.size) < 1:
                self.height += config.size[0] < 1
                self.width += config.size[1] < 1
                config = self.config()
            largest = max(math.prod(config.x.shape), math.prod(config.value_shape))
            if config.work <= limit and largest <= min(limit, ELEMENTS):
                return
            self._shrink(rng, turn > _PATIENCE)

    def _shrink(self, rng: random.Random, drastic: bool) -> None:
        pools = {"batch": BATCHES[1:], "height": IMAGE, "width": (*IMAGE, *WIDE)}
        pools |= {"channels": CHANNELS, "out_channels": OUT_CHANNELS, "groups": (1, 2, 3)}
        able = [name for name in pools if getattr(self, name) > 1]
        if drastic or not able:
            self.kernel, self.padding, self.output_padding = (1, 1), 0, 0
        name = rng.choice(able or ["batch"])
        now = getattr(self, name)
        setattr(self, name, rng.choice([size for size in pools[name] if size < now] or [1]))


def _padding(rng: random.Random, transposed: bool, kernel: Pair, stride: Pair) -> Pair | str:
    kind = rng.random()
    if not transposed and kind < 0.15:
        return "same" if stride == (1, 1) else "valid"
    if kind < 0.35:
        return kernel[0] // 2, kernel[1] // 2
    if kind < 0.7:
        return rng.randint(0, kernel[0]), rng.randint(0, kernel[1])
    return 0, 0


def _data(
    rng: random.Random, shape: tuple[int, ...], dtype: str, *, tail: bool, integers: bool
) -> TensorRecipe:
    fill, specials = draw_fill(rng, FILLS)
    span = rng.choice((4, 12, 40)) if fill in SCALED else 0
    if fill in SCALED and (dtype == "float16" or tail):
        fill, span = "randn", 0
    if integers:
        fill, span, specials = "integers", 0, 0
    specials = min(specials, 1 + math.prod(shape) // 64)  # some results are to stay finite
    layout = draw_layout(rng, 0.5, IMAGE_LAYOUTS)
    return TensorRecipe(shape, dtype, fill, layout, span, specials=specials)


def draw(seed: int, limit: int) -> ConvConfig:
    """Draw the configuration of `seed`, with at most `limit` multiplications."""
    from pycutfuse.testing.repro.conv_mistakes import MISTAKES

    rng = random.Random(f"conv {seed}")
    mechanism = rng.choices(tuple(MECHANISMS), tuple(MECHANISMS.values()))[0]
    shares = (70, 0, 30) if mechanism == "planes" else (40, 30, 30)
    kind = rng.choices(("conv2d", "conv_transpose2d", "conv2d_batch_norm"), shares)[0]
    sizes = _Sizes.draw(rng, kind == "conv_transpose2d")
    sizes.suit(rng, mechanism)
    unbatched = kind != "conv2d_batch_norm" and rng.random() < 0.1
    sizes.batch = 1 if unbatched else sizes.batch
    sizes.fit(rng, limit)
    config = replace(sizes.config(), seed=seed)
    if unbatched:
        config = replace(config, x=TensorRecipe(config.x.shape[1:]))
    dtype = draw_dtype(rng)
    if mechanism == "planes":
        dtype = "float32"
    elif mechanism is not None and rng.random() < 0.25:
        dtype = rng.choice(HALF)
    tail = BatchNorm.draw(rng, dtype) if kind == "conv2d_batch_norm" else None
    integers = dtype == "float32" and tail is None and rng.random() < 0.15
    config = _with_tensors(rng, config, dtype, tail, integers=integers)
    handling = draw_handling(rng, config.call) | {"allow_tf32": rng.random() < 0.5}
    config = replace(config, **handling)
    if mechanism == "planes":
        config = replace(config, allow_tf32=True, precision=None)
    if mechanism is not None:
        config = _suited(rng, config, mechanism)
    one_value = math.prod(config.value_shape) == config.n
    training = isinstance(tail, BatchNorm) and tail.training
    config = finish(rng, config, MISTAKES, invalid_anyway=training and one_value)
    return _embellished(rng, config)


def _with_tensors(
    rng: random.Random, config: ConvConfig, dtype: str, tail: BatchNorm | None, *, integers: bool
) -> ConvConfig:
    """Draw data, bias and programs."""
    options = {"tail": tail is not None, "integers": integers}
    x = _data(rng, config.x.shape, dtype, **options)
    weight = _data(rng, config.weight.shape, dtype, **options)
    if config.transposed or config.padding not in (0, (0, 0), "valid"):
        weight = replace(weight, specials=0)  # torch's algorithm says what they make of padding
    if not integers and (dtype in HALF or rng.random() < 0.5):
        weight = replace(weight, exponent=-round(math.log2(config.k) / 2))
    bias = draw_bias(rng, config.n, dtype, integers=integers, layouts=IMAGE_LAYOUTS)
    call, shape = rng.choice(("ops", "module")), config.value_shape
    after: tuple[StepRecipe, ...] = ()
    program: tuple[StepRecipe, ...] = ()
    if tail is None or call == "ops":
        most = MAX_STEPS - (bias is not None)
        program = draw_program(rng, shape, dtype, most, integers=integers, pixel_dims=2)
    if tail is not None:
        after = draw_program(rng, shape, dtype, MAX_STEPS - 1, pixel_dims=2)
        if call == "module":
            after = (_scaling(rng, shape, dtype), *after)
    made = replace(config, x=x, weight=weight, bias=bias, program=program, after=after)
    return replace(made, tail=tail, call=call)


def _suited(rng: random.Random, config: ConvConfig, mechanism: str) -> ConvConfig:
    """Draw a policy for one of `MECHANISMS`, and lay most images out as it reads them."""
    layout = "contiguous" if mechanism == "planes" else "channels_last"
    if rng.random() < (0.6 if mechanism == "images" else 0.9):
        x = replace(config.x, layout=layout)
        weight = config.weight
        if rng.random() < 0.7:
            weight = replace(weight, layout=layout)
        config = replace(config, x=x, weight=weight)
    policy = rng.randrange(1000) if rng.random() < 0.75 else None
    return replace(config, policy=policy)


def _scaling(rng: random.Random, shape: tuple[int, ...], dtype: str) -> StepRecipe:
    """The factor of Conv2dBatchNorm2dScale."""
    kind = rng.random()
    if kind < 0.4:
        return StepRecipe("mul", (rng.choice((2.0, 0.5, -1.5)),))
    if kind < 0.5:  # of any shape, which the plain chain takes
        operand = draw_operand(rng, "mul", shape, dtype, integers=False, pixel_dims=2)
    else:
        place = rng.choice(((), (shape[-3], 1, 1)))
        operand = TensorRecipe(place, dtype, "away_from_zero", draw_layout(rng, 0.6))
    return StepRecipe("mul", (), operand)


def _embellished(rng: random.Random, config: ConvConfig) -> ConvConfig:
    """Draw what few calls have: a range at the end of float32's, a padding mode, an output size."""
    x, weight, plain = config.x, config.weight, not config.backward and config.mistake is None
    if plain and config.bias is not None and config.n > 7 and rng.random() < 0.08:
        specials = 0 if config.integers else 1
        config = replace(config, bias=replace(config.bias, specials=specials))
    wide_range = x.dtype in ("float32", "float64", "bfloat16") and not config.integers
    if plain and wide_range and rng.random() < 0.12:
        far = rng.choice((-100, -40, 40, 100))
        x = replace(x, exponent=far)
        exponent = rng.choice((weight.exponent, -far, far))
        return replace(config, x=x, weight=replace(weight, exponent=exponent))
    if config.call != "module" or not plain:
        return config
    stride, extra = both(config.stride), both(config.output_padding)
    if config.transposed and extra[0] < stride[0] and extra[1] < stride[1]:
        return replace(config, sized=rng.random() < 0.3)
    small = min(config.x.shape[-2:])
    if config.transposed or isinstance(config.padding, str) or max(both(config.padding)) >= small:
        return config
    mode = rng.choice(PADDING_MODES) if rng.random() < 0.2 else "zeros"
    return replace(config, padding_mode=mode)
