"""Steps of programs: how to draw one, build it, say it in torch, and bound its rounding.

The torch functions are written here again, and not taken from `pycutfuse.reference`, so that a
mistake there is seen as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pycutfuse import program as pcf
from pycutfuse.program import Step
from pycutfuse.testing.repro.tensors import TensorRecipe, draw_layout

Constants = tuple[float, ...]


@dataclass(frozen=True)
class StepRecipe:
    """One step: a key of ``STEPS`` with constants or an operand."""

    name: str
    constants: Constants = ()
    operand: TensorRecipe | None = None


@dataclass(frozen=True)
class StepKind:
    """What the fuzzer knows of a step.

    `plain` and `rounding` take the value, and the operand or the first constant, and constants;
    `rounding` also takes the result, and returns what one unit roundoff is multiplied by.
    """

    build: Callable[..., Step]  # of the operand or the constants
    plain: Callable[[Tensor, Any, Constants], Tensor]
    rounding: Callable[[Tensor, Tensor, Any, Constants], Tensor]
    draw: Callable[[random.Random], Constants] = lambda rng: ()
    kinks: Callable[[Constants], tuple[float, ...]] = lambda c: ()
    binary: bool = False
    curved: bool = False  # not monotone: an interval's image is not that of its ends
    integer: bool = False  # whole numbers stay whole
    weight: float = 1.0  # how often it is drawn


def _number(rng: random.Random) -> Constants:
    sign = rng.choice((-1, 1))
    return (sign * rng.choice((0.1, 0.37, 0.5, 1.0, 1.5, 2.0, 3.7)),)


def _bound(sign: int) -> Callable[[random.Random], Constants]:
    """A bound that mostly leaves values around zero alone: constants hide what came before."""

    def draw(rng: random.Random) -> Constants:
        return (rng.choice((1, 1, 1, 1, 1, -1)) * sign * rng.choice((0.1, 0.37, 1.5, 3.7, 6.0)),)

    return draw


def _pair(rng: random.Random) -> Constants:
    if rng.random() < 0.1:
        return rng.choice(((0.0, 0.0), (0.25, 0.75)))
    return rng.choice((-3.0, -1.0, -0.5, 0.0)), rng.choice((0.5, 1.0, 6.0))


def _softplus(rng: random.Random) -> Constants:
    return rng.choice((0.5, 1.0, 2.0)), rng.choice((3.0, 20.0))


def _slope(rng: random.Random) -> Constants:
    return (rng.choice((0.0, 0.01, 0.2, 1.0, 2.0, -0.5)),)


def _size(other: Any) -> Any:
    return other.abs() if isinstance(other, Tensor) else abs(other)


def _sum_rounding(v: Tensor, f: Tensor, o: Any, c: Constants) -> Tensor:
    size: Tensor = f.abs() + _size(o)
    return size


def _twice(v: Tensor, f: Tensor, o: Any, c: Constants) -> Tensor:
    return 2 * f.abs()


def _none(v: Tensor, f: Tensor, o: Any, c: Constants) -> Tensor:
    return torch.zeros_like(f)


def _cancelling(v: Tensor, f: Tensor, o: Any, c: Constants) -> Tensor:
    return 4 * torch.maximum(f.abs(), v.abs().clamp_max(6.0))


def _exponential(v: Tensor, f: Tensor, o: Any, c: Constants) -> Tensor:
    beta = abs(c[0]) if c else 1.0
    return (4 + (beta * v.abs()).clamp_max(100.0)) * f.abs()


def _sum(build: Callable[..., Step], plain: Callable[[Tensor, Any, Constants], Tensor]) -> StepKind:
    return StepKind(build, plain, _sum_rounding, _number, binary=True, integer=True)


def _limit(
    build: Callable[..., Step],
    plain: Callable[[Tensor, Any, Constants], Tensor],
    draw: Callable[[random.Random], Constants],
) -> StepKind:
    return StepKind(build, plain, _twice, draw, lambda c: c, integer=True, weight=0.4)


STEPS: dict[str, StepKind] = {
    "add": _sum(pcf.add, lambda v, o, c: v + o),
    "sub": _sum(pcf.sub, lambda v, o, c: v - o),
    "mul": StepKind(pcf.mul, lambda v, o, c: v * o, _twice, _number, binary=True, integer=True),
    "div": StepKind(pcf.div, lambda v, o, c: v / o, _twice, _number, binary=True),
    "minimum": _limit(pcf.minimum, lambda v, o, c: v.clamp(max=o), _bound(1)),
    "maximum": _limit(pcf.maximum, lambda v, o, c: v.clamp(min=o), _bound(-1)),
    "relu": StepKind(
        pcf.relu, lambda v, o, c: F.relu(v), _none, kinks=lambda c: (0.0,), integer=True
    ),
    "leaky_relu": StepKind(
        pcf.leaky_relu, lambda v, o, c: F.leaky_relu(v, o), _twice, _slope, lambda c: (0.0,)
    ),
    "sigmoid": StepKind(pcf.sigmoid, lambda v, o, c: torch.sigmoid(v), _exponential),
    "tanh": StepKind(pcf.tanh, lambda v, o, c: torch.tanh(v), _cancelling),
    "gelu": StepKind(pcf.gelu, lambda v, o, c: F.gelu(v), _cancelling, curved=True),
    "gelu_tanh": StepKind(
        lambda: pcf.gelu(approximate="tanh"),
        lambda v, o, c: F.gelu(v, approximate="tanh"),
        _cancelling,
        curved=True,
    ),
    "silu": StepKind(pcf.silu, lambda v, o, c: F.silu(v), _exponential, curved=True),
    "mish": StepKind(pcf.mish, lambda v, o, c: F.mish(v), _exponential, curved=True),
    "hardswish": StepKind(
        pcf.hardswish,
        lambda v, o, c: F.hardswish(v),
        _cancelling,
        kinks=lambda c: (-3.0, 3.0),
        curved=True,
    ),
    "clamp": _limit(pcf.clamp, lambda v, o, c: v.clamp(c[0], c[1]), _pair),
    "clamp_max": _limit(
        lambda high: pcf.clamp(max=high), lambda v, o, c: v.clamp(max=c[0]), _bound(1)
    ),
    "hardtanh": _limit(pcf.hardtanh, lambda v, o, c: F.hardtanh(v, c[0], c[1]), _pair),
    "softplus": StepKind(
        pcf.softplus,
        lambda v, o, c: F.softplus(v, c[0], c[1]),
        _exponential,
        _softplus,
        lambda c: (c[1] / c[0],),
    ),
}


def draw_step(
    rng: random.Random,
    out_shape: tuple[int, ...],
    dtype: str,
    *,
    integers: bool = False,
    pixel_dims: int = 0,
) -> StepRecipe:
    """Draw a step for a value of `out_shape`; with `integers`, one that keeps them exact."""
    names = [name for name, kind in STEPS.items() if kind.integer or not integers]
    name = rng.choices(names, [STEPS[name].weight for name in names])[0]
    kind = STEPS[name]
    if kind.binary and rng.random() < 0.6:
        operand = draw_operand(
            rng, name, out_shape, dtype, integers=integers, pixel_dims=pixel_dims
        )
        return StepRecipe(name, (), operand)
    constants = kind.draw(rng)
    if integers:
        constants = tuple(float(round(c)) for c in constants)
    return StepRecipe(name, constants)


_FORMS = ("scalar", "vector", "vector", "column", "full", "mixed")
# No kernel reads a column or most of the mixed ones beside an image.
_IMAGE_FORMS = (*("scalar", "vector", "vector", "vector", "full") * 3, "column", "mixed")


def draw_operand(
    rng: random.Random,
    name: str,
    out_shape: tuple[int, ...],
    dtype: str,
    *,
    integers: bool,
    pixel_dims: int = 0,
) -> TensorRecipe:
    """A scalar, a vector, a column, a full tensor, or one with any dimensions of size 1.

    A vector has one value for each channel, which `pixel_dims` more dimensions follow.
    """
    channel = len(out_shape) - 1 - pixel_dims
    form = rng.choice(_IMAGE_FORMS if pixel_dims else _FORMS)
    if form == "scalar":
        shape: tuple[int, ...] = ()
    elif form == "vector":
        shape = (out_shape[channel], *(1,) * pixel_dims)
    elif form == "column":
        shape = (*out_shape[:channel], 1, *out_shape[channel + 1 :])
    elif form == "full":
        shape = out_shape
    else:
        kept = out_shape[rng.randrange(len(out_shape)) :]
        shape = tuple(rng.choice((1, size)) for size in kept)
    fill = "away_from_zero" if name == "div" else rng.choice(("randn", "rand", "away_from_zero"))
    return TensorRecipe(
        shape,
        dtype,
        "integers" if integers else fill,
        draw_layout(rng, 0.6),
        on_cpu=form == "scalar" and rng.random() < 0.15,
    )


def build(recipe: StepRecipe, operand: Tensor | None) -> Step:
    """The step as users write it."""
    kind = STEPS[recipe.name]
    return kind.build(*recipe.constants) if operand is None else kind.build(operand)
