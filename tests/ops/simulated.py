"""A binding that reads and writes host memory through the addresses and strides it is given.

It stands in for `_C` so that what crosses the border is checked without a GPU: a wrong stride or
pointer gives a wrong result, or a NaN out of a gap.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pycutfuse import _loader, support
from pycutfuse.ops import _frozen, _launch, _replay, _workspace
from pycutfuse.program import MAX_STEPS, OPS
from pycutfuse.reference import apply_program

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _matrix(
    address: int, rows: int, columns: int, row_stride: int, col_stride: int, dtype: int = 0
) -> Tensor:
    length = (rows - 1) * row_stride + (columns - 1) * col_stride + 1
    memory = (ctypes.c_char * (length * DTYPES[dtype].itemsize)).from_address(address)
    flat = torch.frombuffer(memory, dtype=DTYPES[dtype])
    return flat.as_strided((rows, columns), (row_stride, col_stride))


def _address(value: Tensor | int | None) -> int:
    return value.data_ptr() if isinstance(value, Tensor) else value or 0


def _addressed(flat: Sequence[int], addresses: Sequence[int]) -> list[int]:
    assert set(flat[::4]) <= {0}
    assert len(flat) == 4 * len(addresses)
    made = list(flat)
    made[::4] = addresses
    return made


@dataclass
class Plan:
    problem: Any  # of `Binding.FusedProblem`
    policy: Any
    workspace_bytes: int = 1000

    def describe(self) -> str:
        return "simulated stage"


class Binding:
    """The part of _C.pyi that operators use. It computes in float32 and rounds the result."""

    OPS = OPS
    MAX_STEPS = MAX_STEPS

    def __init__(self) -> None:
        self.replay = _loader.native().binding.replay
        self.TAILS = {"none": 0, "batch_norm_train": 1, "batch_norm_eval": 2, "logsumexp": 3}
        self.planned = 0
        self.launched = 0
        self.last: dict[str, Any] = {}

    def Program(self, codes: Sequence[int], constants: Sequence[float]) -> Any:  # noqa: N802
        return tuple(codes), tuple(constants)

    def FusedProblem(self, *given: Any) -> Any:  # noqa: N802
        names = "m n k program tail after precision dtype weight_planes x_leading weight_leading"
        return SimpleNamespace(**dict(zip(names.split(), given, strict=True)))

    def why_not(self, problem: Any, device: object) -> str | None:
        return "K is over the limit of 4000" if problem.k > 4000 else None

    def make_plan(self, problem: Any, device: object, policy: object) -> Plan:
        self.planned += 1
        made = policy or SimpleNamespace(arch=90)
        return Plan(problem, made, 0 if problem.dtype else 1000)

    def planes_layout(self, rows: int, k: int, count: int) -> tuple[int, int, int]:
        leading = -(-k // 8) * 8
        return leading, 2 * count * rows * leading, 4 * (-(-rows // 4) * 4)

    def bind(self, plan: Plan, *numbers: Any) -> Callable[..., None]:
        return partial(self._launch, plan, numbers)

    def _launch(self, plan: Plan, numbers: Sequence[Any], *given: Any) -> None:
        self.launched += 1
        x_strides, weight_strides, (first, second, out_stride) = (
            numbers[:2],
            numbers[2:4],
            numbers[4:7],
        )
        out, save, workspace, words, momentum, eps, promotion, stream, tensors = given
        out, save, words, *at = map(_address, (out, save, words, *tensors))
        end = 3 + len(first) // 4
        operands = _addressed(first, at[3:end])
        after_operands = _addressed(second, at[len(at) - len(second) // 4 :])
        save_invstd = save + 4 * plan.problem.n
        stats = (*at[end : end + 5], *numbers[7:9], save, save_invstd)
        x, weight = (at[0], *x_strides), (at[1], *weight_strides)
        planes = (at[2], words) if plan.problem.weight_planes else (0, 0)
        assert workspace % 16 == 0
        self.last = {"workspace": workspace, "promotion": promotion, "stream": stream}
        self.last |= {"planes": planes, "problem": plan.problem}
        problem = plan.problem
        m, n, k, dtype = problem.m, problem.n, problem.k, problem.dtype
        assert all(planes) == any(planes) == problem.weight_planes
        if dtype and plan.policy.arch >= 80:
            for (address, *strides), leading in (
                (x, problem.x_leading),
                (weight, problem.weight_leading),
            ):
                assert address % 16 == leading % 8 == 0
                assert strides == [leading, 1]
        else:
            assert problem.x_leading == problem.weight_leading == 0
        rows, features = (
            _matrix(x[0], m, k, *x[1:], dtype),
            _matrix(weight[0], n, k, *weight[1:], dtype),
        )
        z = apply_program(
            rows.float() @ features.float().T, *problem.program, self._operands(operands, m, n)
        )
        if problem.tail in (1, 2):
            z = self._batch_norm(z, problem.tail == 1, stats, momentum, eps)
        if problem.tail == 3:
            _matrix(out, m, 1, 1, 1, dtype)[:, 0].copy_(z.logsumexp(1))
            return
        z = apply_program(z, *problem.after, self._operands(after_operands, m, n))
        _matrix(out, m, n, out_stride, 1, dtype).copy_(z)

    @staticmethod
    def _batch_norm(
        z: Tensor, training: bool, stats: Sequence[int], momentum: float, eps: float
    ) -> Tensor:
        gamma, beta, mean, var, count, affine, running, save_mean, save_invstd = stats
        n = z.shape[1]

        def vector(at: int, dtype: int) -> Tensor | None:
            return _matrix(at, 1, n, n, 1, dtype)[0] if at else None

        factor = momentum
        if training and count:
            tracked = ctypes.c_int64.from_address(count)
            tracked.value += 1
            factor = 1 / tracked.value if momentum < 0 else momentum
        own = [vector(at, running) for at in (mean, var)]
        wide = [None if one is None else one.float() for one in own]
        scale, shift = (
            None if one is None else one.float()
            for one in (vector(gamma, affine), vector(beta, affine))
        )
        result, found_mean, found_invstd = torch.ops.aten.native_batch_norm(
            z, scale, shift, *wide, training, factor, eps
        )
        if training:
            vector(save_mean, 0).copy_(found_mean)
            vector(save_invstd, 0).copy_(found_invstd)
            for one, value in zip(own, wide, strict=True):
                if one is not None:
                    one.copy_(value)
        return result

    @staticmethod
    def _operands(flat: Sequence[int], m: int, n: int) -> list[Tensor]:
        quads = [flat[at : at + 4] for at in range(0, len(flat), 4)]
        return [_matrix(quad[0], m, n, *quad[1:]).float() for quad in quads]


def hide_devices(patch: pytest.MonkeyPatch) -> None:
    """Let the current device and its memory be the host's, also where torch has a GPU's."""
    asked, answer = _workspace._current_device, lambda: -1
    patch.setattr(_workspace, "_current_device", answer)
    state = [answer if function is asked else function for function in _replay._STATE]
    patch.setattr(_replay, "_STATE", tuple(state))
    if _workspace._allocate is getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None):
        patch.setattr(_workspace, "_allocate", None)


def install(patch: pytest.MonkeyPatch) -> Binding:
    """Let the operators' CUDA kernels run on host memory through a new `Binding`."""
    binding = Binding()
    loaded = _loader.Native(binding, None)
    for module in (support, _launch, _frozen):
        patch.setattr(module, "native", lambda: loaded)
    patch.setattr(support, "device_problem", lambda index: None)
    patch.setattr(support, "device_props", lambda index: SimpleNamespace(index=index))
    for module in (_frozen, _launch):
        patch.setattr(module, "raw_stream", lambda index: 77)
    hide_devices(patch)
    _launch.clear_caches()
    return binding
