"""A binding that reads and writes host memory through the addresses and strides it is given.

It stands in for `_C` so that what crosses the border is checked without a GPU: a wrong stride or
pointer gives a wrong result, or a NaN out of a gap.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pycutfuse import _loader, support
from pycutfuse.ops import _frozen, _launch
from pycutfuse.program import MAX_STEPS, OPS
from pycutfuse.reference import apply_program


def _matrix(address: int, rows: int, columns: int, row_stride: int, col_stride: int) -> Tensor:
    length = (rows - 1) * row_stride + (columns - 1) * col_stride + 1
    memory = (ctypes.c_float * length).from_address(address)
    flat = torch.frombuffer(memory, dtype=torch.float32)
    return flat.as_strided((rows, columns), (row_stride, col_stride))


@dataclass
class Plan:
    m: int
    n: int
    k: int
    program: tuple[Any, Any]
    tail: int
    after: tuple[Any, Any]
    policy: object
    workspace_bytes: int = 1000

    def describe(self) -> str:
        return "simulated stage"


class Binding:
    """The part of _C.pyi that operators use."""

    OPS = OPS
    MAX_STEPS = MAX_STEPS

    def __init__(self) -> None:
        self.TAILS = {"none": 0, "batch_norm_train": 1, "batch_norm_eval": 2}
        self.planned = 0
        self.launched = 0
        self.last: dict[str, Any] = {}

    def Program(self, codes: Sequence[int], constants: Sequence[float]) -> Any:  # noqa: N802
        return tuple(codes), tuple(constants)

    def why_not(self, m: int, n: int, k: int, *_: object) -> str | None:
        return "K is over the limit of 4000" if k > 4000 else None

    def make_plan(
        self, m: int, n: int, k: int, program: Any, tail: int, after: Any, *rest: Any
    ) -> Plan:
        self.planned += 1
        return Plan(m, n, k, program, tail, after, rest[-1])

    def run(self, plan: Plan, *arguments: Any) -> None:
        self.launched += 1
        x, weight = arguments[0:3], arguments[3:6]
        operands, after_operands, out, out_stride, stats, momentum, eps = arguments[8:15]
        workspace, promotion, stream = arguments[15:]
        self.last = {"workspace": workspace, "promotion": promotion, "stream": stream}
        m, n, k = plan.m, plan.n, plan.k
        z = _matrix(x[0], m, k, *x[1:]) @ _matrix(weight[0], n, k, *weight[1:]).T
        z = apply_program(z, *plan.program, self._operands(operands, m, n))
        if plan.tail:
            gamma, beta, mean, var, count, save_mean, save_invstd = stats
            vector = lambda at: _matrix(at, 1, n, n, 1)[0] if at else None  # noqa: E731
            factor = momentum
            if plan.tail == 1 and count:
                tracked = ctypes.c_int64.from_address(count)
                tracked.value += 1
                factor = 1 / tracked.value if momentum < 0 else momentum
            z, found_mean, found_invstd = torch.ops.aten.native_batch_norm(
                z, vector(gamma), vector(beta), vector(mean), vector(var), plan.tail == 1,
                factor, eps,
            )  # fmt: skip
            if plan.tail == 1:
                vector(save_mean).copy_(found_mean)
                vector(save_invstd).copy_(found_invstd)
        z = apply_program(z, *plan.after, self._operands(after_operands, m, n))
        _matrix(out, m, n, out_stride, 1).copy_(z)

    @staticmethod
    def _operands(flat: Sequence[int], m: int, n: int) -> list[Tensor]:
        return [_matrix(flat[at], m, n, *flat[at + 1 : at + 3]) for at in range(0, len(flat), 3)]


def install(patch: pytest.MonkeyPatch) -> Binding:
    """Let the operators' CUDA kernels run on host memory through a new `Binding`."""
    binding = Binding()
    loaded = _loader.Native(binding, None)
    for module in (support, _launch, _frozen):
        patch.setattr(module, "native", lambda: loaded)
    patch.setattr(support, "device_problem", lambda index: None)
    patch.setattr(support, "device_props", lambda index: SimpleNamespace(index=index))
    patch.setattr(_launch, "raw_stream", lambda index: 77)
    _launch.clear_caches()
    return binding
