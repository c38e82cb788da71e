"""The table of benchmark cases, each a PyTorch chain and the module that replaces it."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pycutfuse import nn as fused_nn
from pycutfuse import program as steps
from pycutfuse.bench.case import AnyCase, Case, ExecutorCase, ForcedCase, SizesCase, like
from pycutfuse.bench.conv_cases import CONV_CASES
from pycutfuse.bench.shapes import Shape
from pycutfuse.program import Step


class LinearScaleBatchNorm(nn.Module):
    """Founding problem 3: bn(gemm(x) * scale)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gemm = nn.Linear(shape.k, shape.n)
        self.scale = nn.Parameter(torch.randn(shape.n))
        self.bn = nn.BatchNorm1d(shape.n)

    def forward(self, x: Tensor) -> Tensor:
        """(m, k) to (m, n)."""
        result: Tensor = self.bn(self.gemm(x) * self.scale)
        return result


class LinearSigmoidLinearLogSumExp(nn.Module):
    """Founding problem 5: logsumexp(linear2(sigmoid(linear1(x))))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        assert shape.last is not None
        self.linear1 = nn.Linear(shape.k, shape.n)
        self.linear2 = nn.Linear(shape.n, shape.last)

    def forward(self, x: Tensor) -> Tensor:
        """(m, k) to (m,)."""
        return torch.logsumexp(self.linear2(torch.sigmoid(self.linear1(x))), dim=1)


class LinearThen(nn.Module):
    """nn.Linear and pointwise steps that may use a per-feature vector."""

    def __init__(
        self, shape: Shape, then: Callable[[Tensor, Tensor], Tensor], bias: bool = True
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(shape.k, shape.n, bias=bias)
        self.vector = nn.Parameter(1 + 0.1 * torch.randn(shape.n))
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        """(m, k) to (m, n)."""
        return self.then(self.linear(x), self.vector)


def fuse_scale_batch_norm(reference: nn.Module) -> nn.Module:
    """The module that replaces a `LinearScaleBatchNorm`."""
    assert isinstance(reference, LinearScaleBatchNorm)
    gemm = reference.gemm
    fused = fused_nn.LinearScaleBatchNorm1d(gemm.in_features, gemm.out_features, gemm.bias.shape)
    return like(reference, fused)


def _fuse_logsumexp(reference: nn.Module) -> nn.Module:
    assert isinstance(reference, LinearSigmoidLinearLogSumExp)
    first, second = reference.linear1, reference.linear2
    fused = fused_nn.LinearSigmoidLinearLogSumExp(
        first.in_features, first.out_features, second.out_features
    )
    return like(reference, fused)


def _fuse_linear(program: Callable[[Tensor], Sequence[Step]]) -> Callable[[nn.Module], nn.Module]:
    def fuse(reference: nn.Module) -> nn.Module:
        assert isinstance(reference, LinearThen)
        epilogue = tuple(program(reference.vector))
        return fused_nn.Linear.from_torch(reference.linear, epilogue=epilogue)

    return fuse


def _linear(
    name: str,
    shape: Shape,
    chain: str,
    then: Callable[[Tensor, Tensor], Tensor],
    program: Callable[[Tensor], Sequence[Step]],
    *,
    bias: bool = True,
) -> Case:
    return Case(
        name=f"{name}.{shape}",
        shape=shape,
        training=False,
        chain=chain,
        reference=lambda at: LinearThen(at, then, bias),
        fused=_fuse_linear(program),
    )


def _sixteen(y: Tensor, v: Tensor) -> Tensor:
    y = torch.sigmoid(y * v + 0.1) * 2.0 - 0.5
    y = F.gelu(y, approximate="tanh") * v + 0.05
    y = F.leaky_relu(F.silu(torch.tanh(y) / 3.0), 0.1)
    return torch.clamp(F.softplus(torch.clamp(y, min=-1.0)), max=4.0)


def _sixteen_steps(v: Tensor) -> tuple[Step, ...]:
    first = (steps.mul(v), steps.add(0.1), steps.sigmoid(), steps.mul(2.0), steps.sub(0.5))
    second = (steps.gelu(approximate="tanh"), steps.mul(v), steps.add(0.05))
    third = (steps.tanh(), steps.div(3.0), steps.silu(), steps.leaky_relu(0.1))
    return (*first, *second, *third, steps.maximum(-1.0), steps.softplus(), steps.minimum(4.0))


def _executor(shape: Shape) -> ExecutorCase:
    """The bias counts as a step, as it does for the limit of 16."""
    name = "executor"
    programs = (
        _linear(f"{name}.bias", shape, "bias", lambda y, v: y, lambda v: ()),
        _linear(
            f"{name}.1",
            shape,
            "sigmoid",
            lambda y, v: torch.sigmoid(y),
            lambda v: (steps.sigmoid(),),
            bias=False,
        ),
        _linear(
            f"{name}.4",
            shape,
            "bias, mul(vector), sigmoid, mul(2)",
            lambda y, v: torch.sigmoid(y * v) * 2.0,
            lambda v: (steps.mul(v), steps.sigmoid(), steps.mul(2.0)),
        ),
        _linear(
            f"{name}.16",
            shape,
            "bias and 15 mixed steps, 5 of them transcendental",
            _sixteen,
            _sixteen_steps,
        ),
    )
    return ExecutorCase(f"{name}.{shape}", shape, programs)


def _scale_batch_norm(shape: Shape, training: bool) -> Case:
    return Case(
        name=f"linear_scale_batch_norm.{shape}.{'train' if training else 'eval'}",
        shape=shape,
        training=training,
        chain="Linear, mul(scale), BatchNorm1d",
        reference=LinearScaleBatchNorm,
        fused=fuse_scale_batch_norm,
    )


FOUNDING = (Shape(16384, 4096, 4096), Shape(1024, 8192, 8192))
GELU = (
    Shape(4096, 4096, 4096),
    Shape(8192, 1024, 4096),
    Shape(2048, 2048, 2048),
    Shape(5000, 3000, 1000),
)
# The contractions of founding problems 3 and 5.
EXECUTOR = (*FOUNDING, Shape(16384, 2048, 4096), Shape(16384, 4096, 1024))

LOGSUMEXP = Shape(16384, 2048, 4096, 1024)


def _gelu(shape: Shape) -> Case:
    def then(y: Tensor, v: Tensor) -> Tensor:
        return F.gelu(y)

    return _linear("linear_gelu", shape, "Linear, gelu", then, lambda v: (steps.gelu(),))


CASES: tuple[AnyCase, ...] = (
    *(_scale_batch_norm(shape, training) for shape in FOUNDING for training in (True, False)),
    Case(
        name=f"linear_sigmoid_linear_logsumexp.{LOGSUMEXP}",
        shape=LOGSUMEXP,
        training=False,
        chain="Linear, sigmoid, Linear, logsumexp",
        reference=LinearSigmoidLinearLogSumExp,
        fused=_fuse_logsumexp,
        reduces_rows=True,
    ),
    *(_gelu(shape) for shape in GELU),
    *(_executor(shape) for shape in EXECUTOR),
    SizesCase("sizes", count=100, largest=16384, compiled=12),
    ForcedCase("sm80", FOUNDING[0], 80),
    *CONV_CASES,
)


def at_shape(m: int, n: int, k: int) -> Case:
    """Linear with a bias and gelu at one of the random sizes."""
    return _gelu(Shape(m, k, n))


def plain_linear(name: str, shape: Shape) -> Case:
    """Linear with a bias alone."""
    return _linear(name, shape, "Linear", lambda y, v: y, lambda v: ())


def select(patterns: Sequence[str]) -> list[AnyCase]:
    """The cases whose name matches any of the shell patterns, in table order; all for none.

    Raises
    ------
    ValueError
        If a pattern matches no case.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in CASES):
            raise ValueError(f"--case {pattern}: no such case; --list shows all {len(CASES)}")
    return [
        case
        for case in CASES
        if not patterns or any(fnmatch.fnmatchcase(case.name, p) for p in patterns)
    ]


def runs_at(case: AnyCase, tier: str) -> bool:
    """Whether a case is measured at a tier: the executor and forced policies only at ieee."""
    return tier == "ieee" or isinstance(case, Case | SizesCase)
