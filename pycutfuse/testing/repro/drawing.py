"""What the families draw alike: data, programs, how a call is made, gradients and mistakes.

A seed names its configuration only as long as the order of the draws stays.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from pycutfuse.program import MAX_STEPS
from pycutfuse.testing.repro.config import Config
from pycutfuse.testing.repro.steps import StepRecipe, draw_step
from pycutfuse.testing.repro.tails import BatchNorm
from pycutfuse.testing.repro.tensors import LAYOUTS, TensorRecipe, draw_layout

HALF = ("float16", "bfloat16")
# Of vectors that a gradient reduces over: beside saturated elements large inputs do not count, and
# 2^40 below the largest is the documented end of the split's range.
GRADIENT_SPAN = 4

AnyConfig = TypeVar("AnyConfig", bound=Config)


class FittingMistake(Protocol):
    """What is read of a mistake here."""

    @property
    def fits(self) -> Any:
        """Whether a configuration can be spoilt so."""


def draw_dtype(rng: random.Random) -> str:
    """Mostly float32."""
    return rng.choices(("float32", *HALF, "float64"), (80, 8, 8, 4))[0]


def draw_fill(rng: random.Random, fills: Mapping[str, int]) -> tuple[str, int]:
    """One of `fills` by weight, and how many non-finite elements it gets."""
    fill = rng.choices(tuple(fills), tuple(fills.values()))[0]
    return fill, rng.choice((1, 3, 40)) if rng.random() < 0.1 else 0


def draw_bias(
    rng: random.Random, n: int, dtype: str, *, integers: bool, layouts: tuple[str, ...] = LAYOUTS
) -> TensorRecipe | None:
    """A bias for six calls of ten."""
    if rng.random() >= 0.6:
        return None
    fill = "integers" if integers else "randn"
    return TensorRecipe((n,), dtype, fill, draw_layout(rng, 0.8, layouts))


def draw_program(
    rng: random.Random,
    shape: tuple[int, ...],
    dtype: str,
    most: int = MAX_STEPS,
    *,
    integers: bool = False,
    pixel_dims: int = 0,
) -> tuple[StepRecipe, ...]:
    """At most `most` steps for a value of `shape`."""
    count = rng.choices((0, rng.randint(1, 4), rng.randint(0, most)), (25, 50, 25))[0]
    steps = []
    for _ in range(min(count, most)):
        step = draw_step(rng, shape, dtype, integers=integers, pixel_dims=pixel_dims)
        if step.operand is not None and not integers and rng.random() < 0.04:
            other = rng.choice((*HALF, "float32", "float64"))
            step = replace(step, operand=replace(step.operand, dtype=other))
        steps.append(step)
    return tuple(steps)


def draw_handling(rng: random.Random, call: str) -> dict[str, Any]:
    """The fields of a `Config` that say how the call is made."""
    return {
        "precision": rng.choices((None, "ieee", "tf32", "torch"), (50, 28, 11, 11))[0],
        "allow_tf32": rng.random() < 0.2,
        "frozen": call == "module" and rng.random() < 0.3,
        "guarded": rng.random() < 0.3,
        "policy": rng.randrange(1000) if rng.random() < 0.25 else None,
    }


def finish(
    rng: random.Random,
    config: AnyConfig,
    mistakes: Mapping[str, FittingMistake],
    *,
    invalid_anyway: bool,
) -> AnyConfig:
    """Draw which gradients are taken, and the mistake of every fourth call."""
    x, weight, tail = config.x, config.weight, config.tail
    if isinstance(tail, BatchNorm) and tail.training:
        x = replace(x, specials=0)  # they would be all that is left of every column
        config = replace(config, x=x, frozen=False)
    names = config.names()
    if x.specials + weight.specials == 0 and rng.random() < 0.4:
        x, weight = (replace(t, span=min(t.span, GRADIENT_SPAN)) for t in (x, weight))
        wanted = tuple(name for name in names if rng.random() < 0.8)
        config = replace(config, x=x, weight=weight, backward=wanted)
    hands_over = random.Random(f"hands over {config.seed}").random() < 0.125
    config = replace(config, hands_over=hands_over)
    if rng.random() < 0.25 and not invalid_anyway:
        fitting = [name for name, mistake in mistakes.items() if mistake.fits(config)]
        # A mistake may add a step, and is not to be one too many by accident.
        program, after = config.program[:8], config.after[:8]
        mistake = rng.choice(fitting)
        config = replace(config, mistake=mistake, program=program, after=after, backward=())
    return config
