"""Configurations of the linear family, drawn from one integer."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

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
from pycutfuse.testing.repro.tails import TAILS, BatchNorm, LogSumExp
from pycutfuse.testing.repro.tensors import TensorRecipe, draw_layout

EDGES = (
    *(1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129),
    *(191, 192, 193, 255, 256, 257),
)
PRIMES = (307, 509, 997, 1021, 2039)
BIG = (1024, 1536, 2048, 3001, 4096)
MATRIX = 2**24  # elements of the output; twice that of x and weight together
FILLS = {"randn": 30, "rand": 25, "lognormal": 15, "rows": 8, "wide": 6, "zero_rows": 6}
SPANS = {"rows": 40, "wide": 16}


@dataclass(frozen=True)
class LinearConfig(Config):
    """One call: ``after(tail(program(x @ weight.T + bias)))``; attributes as `Config`."""

    @property
    def n(self) -> int:
        """Rows of weight."""
        return self.weight.shape[0]

    @property
    def k(self) -> int:
        """Reduced size."""
        return self.weight.shape[1]

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Shape of the contraction's result."""
        return (*self.x.shape[:-1], self.n)


def _size(rng: random.Random, largest: int) -> int:
    kind = rng.random()
    if kind < 0.02:
        return 0
    pool = EDGES if kind < 0.55 else PRIMES if kind < 0.75 else (*BIG, largest)
    return min(rng.choice(pool), largest)


def draw_sizes(rng: random.Random, limit: int) -> tuple[int, int, int]:
    """(M, N, K) with M * N * K at most `limit`."""
    sizes = [_size(rng, 4096), _size(rng, 4096), _size(rng, 8192)]

    def too_much() -> bool:
        m, n, k = sizes
        return m * n * k > limit or m * n > min(MATRIX, limit) or (m + n) * k > 2 * MATRIX

    while too_much():
        sizes[sizes.index(max(sizes))] = rng.choice(EDGES)
    return sizes[0], sizes[1], sizes[2]


def _leading(rng: random.Random, m: int) -> tuple[int, ...]:
    kind = rng.random()
    if kind < 0.65:
        return (m,)
    if kind < 0.72:
        return ()
    first = rng.choice((1, 2, 3, 7))
    if kind < 0.88:
        return (first, m // first)
    return (first, 2, m // (2 * first))


def _data(
    rng: random.Random, shape: tuple[int, ...], dtype: str, *, tail: bool, integers: bool
) -> TensorRecipe:
    fill, specials = draw_fill(rng, FILLS)
    if fill in SPANS and (dtype == "float16" or (tail and fill == "rows")):
        fill = "randn"
    if integers:
        fill, specials = "integers", 0
    span = SPANS.get(fill, 0)
    return TensorRecipe(shape, dtype, fill, draw_layout(rng), span, specials=specials)


def draw(seed: int, limit: int) -> LinearConfig:
    """Draw the configuration of `seed`, with M * N * K at most `limit`."""
    from pycutfuse.testing.repro.mistakes import MISTAKES

    rng = random.Random(seed)
    m, n, k = draw_sizes(rng, limit)
    dtype = draw_dtype(rng)
    tail_name = rng.choices((None, *TAILS), (60, *[40 / len(TAILS)] * len(TAILS)))[0]
    integers = dtype == "float32" and tail_name is None and rng.random() < 0.15
    leading = (m,) if tail_name == "batch_norm" else _leading(rng, m)
    shape = (*leading, n)
    x = _data(rng, (*leading, k), dtype, tail=tail_name is not None, integers=integers)
    weight = _data(rng, (n, k), dtype, tail=tail_name is not None, integers=integers)
    if not integers and (dtype in HALF or rng.random() < 0.5):
        weight = replace(weight, exponent=-round(math.log2(max(k, 1)) / 2))
    bias = draw_bias(rng, n, dtype, integers=integers)
    most = MAX_STEPS - (bias is not None)
    tail = None if tail_name is None else TAILS[tail_name].draw(rng, dtype)
    program = draw_program(rng, shape, dtype, most, integers=integers)
    after: tuple[StepRecipe, ...] = ()
    call = rng.choice(("ops", "module"))
    if isinstance(tail, LogSumExp):
        call = "module"
    elif isinstance(tail, BatchNorm):
        after = draw_program(rng, shape, dtype)
        if call == "module":
            scale = draw_operand(rng, "mul", shape, dtype, integers=False)
            program = (StepRecipe("mul", (), replace(scale, on_cpu=False)),)
    head = (seed, x, weight, bias, program, tail, after, call)
    config = LinearConfig(*head, **draw_handling(rng, call))
    one_row = isinstance(tail, BatchNorm) and tail.training and m == 1
    return finish(rng, config, MISTAKES, invalid_anyway=one_row)
