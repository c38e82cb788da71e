"""`simulated.Binding` with chains of two contractions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from pycutfuse import _loader, support
from pycutfuse.ops import _chain_launch, _frozen, _launch
from pycutfuse.reference import apply_program

from .simulated import DTYPES, Binding, _matrix, install


@dataclass
class ChainPlan:
    first: Any  # of `Binding.FusedProblem`
    second: Any
    workspace_bytes: int = 1000

    def describe(self) -> str:
        return "first stage\nsecond stage"


class ChainBinding(Binding):
    """It computes in float32 and rounds what lies between the contractions, and the result."""

    def why_not_chain(self, first: Any, second: Any, device: object) -> str | None:
        assert (first.tail, second.tail) == (0, 3)
        assert (first.m, first.n, first.dtype) == (second.m, second.k, second.dtype)
        return self.why_not(first, device) or self.why_not(second, device)

    def make_chain(self, first: Any, second: Any, device: object) -> ChainPlan:
        self.planned += 1
        return ChainPlan(first, second)

    def run_chain(
        self,
        plan: ChainPlan,
        dtype: int,
        x: int,
        x_row_stride: int,
        x_col_stride: int,
        first_weight: Sequence[int],
        second_weight: Sequence[int],
        first_operands: Sequence[int],
        second_operands: Sequence[int],
        out: int,
        out_row_stride: int,
        workspace: int,
        promotion: float,
        stream: int,
    ) -> None:
        self.launched += 1
        first, second = plan.first, plan.second
        assert (stream, promotion) == (77, 1 + 2**-23)
        assert workspace != 0
        assert first.dtype == dtype
        self._check_row(first, x, x_row_stride, x_col_stride, first.x_leading)
        assert second.x_leading == 0
        rows = _matrix(x, first.m, first.k, x_row_stride, x_col_stride, dtype).float()
        hidden = self._layer(rows, first, first_weight, first_operands).to(DTYPES[dtype])
        logits = self._layer(hidden.float(), second, second_weight, second_operands)
        _matrix(out, first.m, 1, 1, 1, dtype)[:, 0].copy_(logits.logsumexp(1))
        self.last = {"problems": (first, second)}

    @staticmethod
    def _check_row(problem: Any, address: int, row_stride: int, col_stride: int, leading: int):
        if problem.dtype:
            assert address % 16 == leading % 8 == 0
            assert (row_stride, col_stride) == (leading, 1)
        else:
            assert leading == 0

    def _layer(
        self, rows: Tensor, problem: Any, weight: Sequence[int], operands: Sequence[int]
    ) -> Tensor:
        at, row_stride, col_stride, planes, words = weight
        self._check_row(problem, at, row_stride, col_stride, problem.weight_leading)
        assert bool(planes) == bool(words) == problem.weight_planes
        matrix = _matrix(at, problem.n, problem.k, row_stride, col_stride, problem.dtype)
        given = self._operands(operands, problem.m, problem.n)
        return apply_program(rows @ matrix.float().T, *problem.program, given)


def install_chain(patch: pytest.MonkeyPatch) -> ChainBinding:
    """`simulated.install`, chains included."""
    install(patch)
    binding = ChainBinding()
    loaded = _loader.Native(binding, None)  # type: ignore[arg-type]
    for module in (support, _launch, _frozen, _chain_launch):
        patch.setattr(module, "native", lambda: loaded)
    patch.setattr(_chain_launch, "raw_stream", lambda index: 77)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return binding
