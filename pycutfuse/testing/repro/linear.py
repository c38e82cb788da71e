"""Configurations of the linear family, drawn from one integer."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from pycutfuse.program import MAX_STEPS
from pycutfuse.testing.repro.steps import StepRecipe, draw_operand, draw_step
from pycutfuse.testing.repro.tails import TAILS, BatchNorm, LogSumExp
from pycutfuse.testing.repro.tensors import TensorRecipe, draw_layout

EDGES = (
    *(1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129),
    *(191, 192, 193, 255, 256, 257),
)
PRIMES = (307, 509, 997, 1021, 2039)
BIG = (1024, 1536, 2048, 3001, 4096)
MATRIX = 2**24  # elements of the output; twice that of x and weight together
HALF = ("float16", "bfloat16")
SPANS = {"rows": 40, "wide": 16}
# Of vectors that a gradient reduces over: beside saturated elements large inputs do not count, and
# 2^40 below the largest is the documented end of the split's range.
GRADIENT_SPAN = 4


@dataclass(frozen=True)
class LinearConfig:
    """One call: ``after(tail(program(x @ weight.T + bias)))``.

    Attributes
    ----------
    seed : int
        Of the data.
    call : {"ops", "module"}
    policy : int or None
        Forces that one of the ``_C.compiled_policies()`` which multiply the call's dtype at its
        tier, counted modulo their number.
    hands_over : bool
        PyTorch runs what it is expected to run faster, as for users; else kernels run that too.
    backward : tuple of str
        Names of the tensors whose gradients are taken; none runs without gradients.
    mistake : str or None
        A key of ``MISTAKES``: what is done to the call before it is made.
    """

    seed: int
    x: TensorRecipe
    weight: TensorRecipe
    bias: TensorRecipe | None = None
    program: tuple[StepRecipe, ...] = ()
    tail: BatchNorm | LogSumExp | None = None
    after: tuple[StepRecipe, ...] = ()
    call: str = "ops"
    precision: str | None = None
    allow_tf32: bool = False
    frozen: bool = False
    guarded: bool = False
    policy: int | None = None
    hands_over: bool = False
    backward: tuple[str, ...] = ()
    mistake: str | None = None

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

    @property
    def integers(self) -> bool:
        """Whether inputs are whole numbers."""
        return self.x.fill == "integers"

    def names(self) -> tuple[str, ...]:
        """Names of the tensors that may have gradients."""
        found = ["x", "weight"]
        if self.bias is not None:
            found.append("bias")
        for word, steps in (("step", self.program), ("after", self.after)):
            found += [f"{word}{at}" for at, step in enumerate(steps) if step.operand is not None]
        if isinstance(self.tail, BatchNorm) and self.tail.affine:
            found += ["bn_weight", "bn_bias"]
        return tuple(found)


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
    fill = rng.choices(
        ("randn", "rand", "lognormal", "rows", "wide", "zero_rows"), (30, 25, 15, 8, 6, 6)
    )[0]
    if fill in ("rows", "wide") and (dtype == "float16" or (tail and fill == "rows")):
        fill = "randn"
    specials = rng.choice((1, 3, 40)) if rng.random() < 0.1 else 0
    if integers:
        fill, specials = "integers", 0
    span = SPANS.get(fill, 0)
    return TensorRecipe(shape, dtype, fill, draw_layout(rng), span, specials=specials)


def _program(
    rng: random.Random, shape: tuple[int, ...], dtype: str, most: int, *, integers: bool
) -> tuple[StepRecipe, ...]:
    count = rng.choices((0, rng.randint(1, 4), rng.randint(0, most)), (25, 50, 25))[0]
    steps = []
    for _ in range(min(count, most)):
        step = draw_step(rng, shape, dtype, integers=integers)
        if step.operand is not None and not integers and rng.random() < 0.04:
            other = rng.choice((*HALF, "float32", "float64"))
            step = replace(step, operand=replace(step.operand, dtype=other))
        steps.append(step)
    return tuple(steps)


def draw(seed: int, limit: int) -> LinearConfig:
    """Draw the configuration of `seed`, with M * N * K at most `limit`."""
    from pycutfuse.testing.repro.mistakes import MISTAKES

    rng = random.Random(seed)
    m, n, k = draw_sizes(rng, limit)
    dtype = rng.choices(("float32", *HALF, "float64"), (80, 8, 8, 4))[0]
    tail_name = rng.choices((None, *TAILS), (60, *[40 / len(TAILS)] * len(TAILS)))[0]
    integers = dtype == "float32" and tail_name is None and rng.random() < 0.15
    leading = (m,) if tail_name == "batch_norm" else _leading(rng, m)
    shape = (*leading, n)
    x = _data(rng, (*leading, k), dtype, tail=tail_name is not None, integers=integers)
    weight = _data(rng, (n, k), dtype, tail=tail_name is not None, integers=integers)
    if not integers and (dtype in HALF or rng.random() < 0.5):
        weight = replace(weight, exponent=-round(math.log2(max(k, 1)) / 2))
    bias = None
    if rng.random() < 0.6:
        fill = "integers" if integers else "randn"
        bias = TensorRecipe((n,), dtype, fill, draw_layout(rng, 0.8))
    most = MAX_STEPS - (bias is not None)
    tail = None if tail_name is None else TAILS[tail_name].draw(rng, dtype)
    program = _program(rng, shape, dtype, most, integers=integers)
    after: tuple[StepRecipe, ...] = ()
    call = rng.choice(("ops", "module"))
    if isinstance(tail, LogSumExp):
        call = "module"
    elif isinstance(tail, BatchNorm):
        after = _program(rng, shape, dtype, MAX_STEPS, integers=False)
        if call == "module":
            scale = draw_operand(rng, "mul", shape, dtype, integers=False)
            program = (StepRecipe("mul", (), replace(scale, on_cpu=False)),)
    config = LinearConfig(
        seed,
        x,
        weight,
        bias,
        program,
        tail,
        after,
        call,
        precision=rng.choices((None, "ieee", "tf32", "torch"), (50, 28, 11, 11))[0],
        allow_tf32=rng.random() < 0.2,
        frozen=call == "module" and rng.random() < 0.3,
        guarded=rng.random() < 0.3,
        policy=rng.randrange(1000) if rng.random() < 0.25 else None,
    )
    if isinstance(tail, BatchNorm) and tail.training:
        x = replace(x, specials=0)  # they would be all that is left of every column
        config = replace(config, x=x, frozen=False)
    names = config.names()
    if x.specials + weight.specials == 0 and rng.random() < 0.4:
        x, weight = (replace(t, span=min(t.span, GRADIENT_SPAN)) for t in (x, weight))
        wanted = tuple(name for name in names if rng.random() < 0.8)
        config = replace(config, x=x, weight=weight, backward=wanted)
    hands_over = random.Random(f"hands over {seed}").random() < 0.125
    config = replace(config, hands_over=hands_over)
    invalid_anyway = isinstance(tail, BatchNorm) and tail.training and m == 1
    if rng.random() < 0.25 and not invalid_anyway:
        fitting = [name for name, mistake in MISTAKES.items() if mistake.fits(config)]
        # A mistake may add a step, and is not to be one too many by accident.
        config = replace(
            config, mistake=rng.choice(fitting), program=program[:8], after=after[:8], backward=()
        )
    return config
