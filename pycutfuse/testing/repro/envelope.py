"""A value in float64 together with how far a correct implementation may be from it.

`Envelope` walks a chain as interval arithmetic does: a step takes the largest change of its
function over value ± error and adds its own rounding. A bare contraction starts with an error of
one `floor` of |A|·|B|, so ``error / floor`` is the scale by which errors are divided, here
carried through whatever follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pycutfuse.testing.repro.steps import STEPS, StepRecipe

RANGE = 2.0**-38  # documented: elements 2^40 below their row's maximum contribute nothing
MARGIN = 3.0  # a result is wrong only if it is this many times further away than promised


@dataclass(frozen=True)
class Rounding:
    """Arithmetic of a call: error of its contraction, unit roundoff of its steps, its range."""

    floor: float
    unit: float
    tiny: float
    largest: float
    narrow: bool  # float16: torch overflows in the middle of a chain where float32 does not

    @classmethod
    def of(cls, dtype: torch.dtype, tier: str, k: int) -> Rounding:
        """Of a chain that starts in `dtype`; `tier` is ``"ieee"`` or ``"tf32"``."""
        facts = torch.finfo(dtype)
        unit = facts.eps / 2
        floor = unit
        if dtype == torch.float32:
            floor = 2.0**-10 if tier == "tf32" else 2.0**-22
        elif dtype == torch.float64:
            floor = unit * max(k, 8)  # both are float64: all that is known is the classic bound
        half = facts.bits == 16
        tiny = facts.smallest_normal * (facts.eps if half else 1.0)
        return cls(floor, unit, tiny, facts.max, dtype == torch.float16)


def clean(error: Tensor, value: Tensor) -> Tensor:
    """No error where nothing is measured: at infinities and NaNs."""
    return torch.where(value.isfinite() & ~error.isnan(), error, 0.0)


def as_rows(value: Tensor, pixel_dims: int) -> Tensor:
    """(M, channels) of a tensor whose channels are followed by `pixel_dims` dimensions."""
    return value.movedim(-1 - pixel_dims, -1).flatten(0, -2)


def of_rows(rows: Tensor, shape: torch.Size, pixel_dims: int) -> Tensor:
    """`as_rows` of a tensor of `shape` undone."""
    at = len(shape) - 1 - pixel_dims
    last = (*shape[:at], *shape[at + 1 :], shape[at])
    return rows.reshape(last).movedim(-1, at)


@dataclass
class Envelope:
    """Attributes: float64 value; error bound; typical error; and two masks.

    `unsure` marks elements that passed a kink within their error, where the derivative is not
    determined; `ambiguous` those that came near the dtype's range.
    """

    value: Tensor
    error: Tensor
    typical: Tensor
    unsure: Tensor
    ambiguous: Tensor
    rounding: Rounding
    exact: bool = True  # all intermediates so far are whole numbers that float32 holds

    @classmethod
    def contraction(cls, x: Tensor, weight: Tensor, rounding: Rounding) -> Envelope:
        """x @ weight.T of float64 tensors."""
        big, wide = x.abs(), weight.abs()
        lost: Any = (x.shape[-1] + 1) * rounding.tiny
        if x.shape[-1]:
            tops = big.amax(-1, keepdim=True) * wide.sum(-1)
            tops = tops + big.sum(-1, keepdim=True) * wide.amax(-1)
            lost = lost + RANGE * tops
        squares = x.square() @ weight.mT.square()
        return cls.of_sums((x @ weight.mT, big @ wide.mT, squares), lost, rounding)

    @classmethod
    def of_sums(cls, sums: Sequence[Tensor], lost: Any, rounding: Rounding) -> Envelope:
        """Sums of products, of their magnitudes and of their squares; `lost` is below range."""
        value, bound, squares = sums
        walk = squares.sqrt()  # of K errors with random signs
        error = rounding.floor * bound + lost
        typical = rounding.floor * torch.maximum(walk, value.abs()) + lost
        made = cls(
            value,
            clean(error, value),
            clean(typical, value),
            torch.zeros_like(value, dtype=torch.bool),
            value.isfinite() & (bound >= rounding.largest / 4),
            rounding,
            bool((bound <= 2.0**22).all()),
        )
        made.saturate()
        return made

    def saturate(self) -> None:
        """Overflow as the dtype does, and mark what came near its range."""
        size, largest = self.value.abs(), self.rounding.largest
        reach = MARGIN * self.error
        low = torch.zeros_like(size) if self.rounding.narrow else size - reach
        near = (size + reach >= 0.9 * largest) & (low <= 1.001 * largest)
        self.ambiguous = self.ambiguous | (near & self.value.isfinite())
        infinite = torch.copysign(torch.full_like(size, float("inf")), self.value)
        self.value = torch.where(size > largest, infinite, self.value)

    def advance(
        self,
        function: Callable[[Tensor], Tensor],
        rounding: Callable[[Tensor, Tensor], Tensor],
        *,
        kinks: tuple[float, ...] = (),
        curved: bool = False,
    ) -> None:
        """Apply a pointwise function; `rounding` of value and result counts units of roundoff."""
        value, result = self.value, function(self.value)
        reach = MARGIN * self.error
        for kink in kinks:
            self.unsure = self.unsure | ((value - kink).abs() <= reach)
        own = self.rounding.unit * rounding(value, result) + self.rounding.tiny

        def carried(error: Tensor) -> Tensor:
            up, down = function(value + error), function(value - error)
            change = torch.maximum((up - result).abs(), (down - result).abs())
            if curved:
                change = change + error.square()
            return clean(change + own, result)

        self.error, self.typical = carried(self.error), carried(self.typical)
        self.value = result
        self.exact = self.exact and bool((result.abs() <= 2.0**22).all())
        self.saturate()

    def step(self, recipe: StepRecipe, operand: Tensor | None) -> None:
        """Apply one step of a program; `operand` in float64."""
        kind, constants = STEPS[recipe.name], recipe.constants
        other: Any = operand if operand is not None else (constants[0] if constants else None)
        self.exact = self.exact and kind.integer
        self.advance(
            lambda v: kind.plain(v, other, constants),
            lambda v, f: kind.rounding(v, f, other, constants),
            kinks=kind.kinks(constants),
            curved=kind.curved,
        )

    def reshape(self, change: Callable[[Tensor], Tensor]) -> None:
        """Give all of it another shape."""
        self.value, self.error, self.typical = map(change, (self.value, self.error, self.typical))
        self.unsure, self.ambiguous = change(self.unsure), change(self.ambiguous)

    @property
    def scale(self) -> Tensor:
        """What an error is divided by: |A|·|B| for a bare contraction, carried on by steps."""
        return self.error / self.rounding.floor
