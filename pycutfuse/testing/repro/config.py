"""What a configuration of every family holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from pycutfuse.testing.repro.steps import StepRecipe
from pycutfuse.testing.repro.tails import BatchNorm, LogSumExp
from pycutfuse.testing.repro.tensors import TensorRecipe


@dataclass(frozen=True)
class Config:
    """One call: ``after(tail(program(contraction(x, weight) + bias)))``.

    Attributes
    ----------
    seed : int
        Of the data.
    call : {"ops", "module"}
    policy : int or None
        Forces that one of the compiled policies which compute the call's dtype at its tier,
        counted modulo their number; of a convolution, one of each mechanism in turn.
    hands_over : bool
        PyTorch runs what it is expected to run faster, as for users; else kernels run that too.
    backward : tuple of str
        Names of the tensors whose gradients are taken; none runs without gradients.
    mistake : str or None
        A key of the family's ``MISTAKES``: what is done to the call before it is made.
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

    # Dimensions of the contraction's result after that of its channels.
    pixel_dims: ClassVar[int] = 0

    @property
    def n(self) -> int:
        """Channels of the contraction's result."""
        raise NotImplementedError

    @property
    def k(self) -> int:
        """Products that make one value of it."""
        raise NotImplementedError

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Shape of the contraction's result."""
        raise NotImplementedError

    @property
    def work(self) -> int:
        """M * N * K: multiplications of the contraction."""
        return math.prod(self.value_shape) * self.k

    @property
    def integers(self) -> bool:
        """Whether inputs are whole numbers."""
        return self.x.fill == "integers"

    @property
    def tail_name(self) -> str:
        """The tail by its name in a problem of `pycutfuse.support`."""
        if isinstance(self.tail, BatchNorm):
            return "batch_norm_train" if self.tail.training else "batch_norm_eval"
        return "none" if self.tail is None else "logsumexp"

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
