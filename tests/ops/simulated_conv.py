"""`simulated.Binding` with convolutions: host memory read and written by address and stride."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pycutfuse import _loader, support
from pycutfuse.ops import _conv_launch, _conv_packed, _launch
from pycutfuse.reference import apply_program
from pycutfuse.testing.repro import conv_calls
from pycutfuse.testing.repro.taps import Taps

from . import simulated

NAMES = (
    "batch channels height width out_channels kernel_h kernel_w stride_h stride_w pad_h pad_w "
    "dilation_h dilation_w groups out_h out_w transposed program tail after precision dtype "
    "packed_weight channels_last pixel_stride"
).split()


def tensor_at(address: int, shape: Sequence[int], strides: Sequence[int], dtype: int) -> Tensor:
    """The memory at `address`; it may not be read beyond the last element."""
    length = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    kind = simulated.DTYPES[dtype]
    memory = (ctypes.c_char * (length * kind.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=kind).as_strided(tuple(shape), tuple(strides))


@dataclass
class Plan:
    problem: Any  # of `ConvBinding.ConvProblem`
    policy: Any
    workspace_bytes: int
    packed_bytes: int
    packed_key: str

    def describe(self) -> str:
        return "simulated convolution"


def is_by_pixels(p: Any) -> bool:
    """Whether a matrix product of pixels takes the problem, whatever its size."""
    settings = (p.kernel_h, p.kernel_w, p.stride_h, p.stride_w, p.groups, p.pad_h, p.pad_w)
    narrow = p.dtype != 0
    return (
        settings == (1, 1, 1, 1, 1, 0, 0)
        and (p.out_h, p.out_w) == (p.height, p.width)
        and p.pixel_stride > 0
        and not (narrow and (p.transposed or p.channels % 8))
        and (p.channels_last or p.height * p.width == 1)
    )


class ConvBinding(simulated.Binding):
    """It computes in float32 and rounds the result."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = 0

    def ConvProblem(self, *given: Any) -> Any:  # noqa: N802
        return SimpleNamespace(**dict(zip(NAMES, given, strict=True)))

    def compiled_conv_policies(self) -> list[object]:
        return []

    def conv_why_not(self, problem: Any, device: object) -> str | None:
        return "more than 128 channels per group" if problem.channels > 128 else None

    def conv_why_slower(self, problem: Any, device: object) -> str | None:
        return "fewer than 100 pixels" if problem.out_h * problem.out_w < 100 else None

    def make_conv_plan(self, problem: Any, device: object, policy: object) -> Plan:
        self.planned += 1
        size = problem.channels * problem.out_channels // problem.groups
        packed = 4 * size * problem.kernel_h * problem.kernel_w
        key = f"{problem.precision} {problem.height % 2}"
        made = policy or SimpleNamespace(
            tile_n=0 if is_by_pixels(problem) else 128,
            gemm=SimpleNamespace(source=0),
            direct=0,
        )
        return Plan(problem, made, 0 if problem.dtype else 1000, packed, key)

    def _weight_shape(self, problem: Any) -> tuple[int, ...]:
        channels = problem.channels, problem.out_channels
        first, second = channels if problem.transposed else channels[::-1]
        return first, second // problem.groups, problem.kernel_h, problem.kernel_w

    def pack_conv_weight(
        self, plan: Plan, weight: int, strides: Sequence[int], packed: int, stream: int
    ) -> None:
        self.packed += 1
        shape = self._weight_shape(plan.problem)
        values = tensor_at(weight, shape, strides, plan.problem.dtype)
        target = tensor_at(packed, (values.numel(),), (1,), 0)
        target.copy_(values.flatten())

    def run_conv(self, plan: Plan, *arguments: Any) -> None:
        self.launched += 1
        x, x_strides, weight, weight_strides, packed, operands, after_operands, out = arguments[:8]
        stats, momentum, eps, workspace, promotion, stream = arguments[8:]
        p = plan.problem
        self.last = {"workspace": workspace, "promotion": promotion, "stream": stream}
        self.last |= {"packed": packed, "problem": p}
        assert bool(packed) == p.packed_weight
        product = plan.policy.tile_n == 0 and not plan.policy.direct
        source = plan.policy.gemm.source if product else 1
        by_pixels = plan.policy.tile_n == 0 and (p.channels_last or source == 0)
        shape = (p.batch, p.channels, p.height, p.width)
        if source == 2:
            assert not p.channels_last
            assert p.pixel_stride == 1
            assert x % 16 == weight % 16 == 0
            images = tensor_at(x, shape, torch.empty(shape, device="meta").stride(), p.dtype)
        elif product and source == 1 and p.dtype and p.pixel_stride:
            assert x % 16 == 0
            images = _pixels(x, x_strides, p)
        elif source == 0:
            assert is_by_pixels(p)
            images = _pixels(x, x_strides, p)
            assert not p.dtype or (x % 16 == weight % 16 == 0 and weight_strides[1] == 1)
        else:
            images = tensor_at(x, shape, x_strides, p.dtype)
        shape = self._weight_shape(p)
        if packed:
            count = shape[0] * shape[1] * shape[2] * shape[3]
            values = tensor_at(packed, (count,), (1,), 0).view(shape)
        else:
            values = tensor_at(weight, shape, weight_strides, p.dtype)
        z = _convolve(images.float(), values.float(), p)
        z = apply_program(z, *p.program, _operands(operands, p, by_pixels))
        if p.tail:
            z = self._batch_norm(z, p.tail == 1, stats, momentum, eps)
        z = apply_program(z, *p.after, _operands(after_operands, p, by_pixels))
        k, h, w = p.out_channels, p.out_h, p.out_w
        strides = (h * w * k, 1, w * k, k) if p.channels_last else (k * h * w, h * w, w, 1)
        tensor_at(out, (p.batch, k, h, w), strides, p.dtype).copy_(z)


def _convolve(x: Tensor, weight: Tensor, p: Any) -> Tensor:
    """The result by its size alone: what is below and right of x is padded as far as it reaches."""
    kernel, stride, padding = (p.kernel_h, p.kernel_w), (p.stride_h, p.stride_w), (p.pad_h, p.pad_w)
    taps = Taps(kernel, stride, padding, (p.dilation_h, p.dilation_w), p.groups, p.transposed)
    return taps.forward(x.double(), weight.double(), (p.out_h, p.out_w)).float()


def _pixels(x: int, strides: Sequence[int], p: Any) -> Tensor:
    """x (N, C, H, W), read as a matrix of pixels."""
    shape = (p.batch * p.height * p.width, p.channels)
    assert not p.dtype or (strides[1] == 1 and p.pixel_stride % 8 == 0)
    rows = tensor_at(x, shape, (p.pixel_stride, strides[1]), p.dtype)
    return rows.view(p.batch, p.height, p.width, p.channels).movedim(-1, 1)


def _operands(flat: Sequence[int], p: Any, by_pixels: bool) -> list[Tensor]:
    found = []
    shape = (p.batch, p.out_channels, p.out_h, p.out_w)
    for at in range(0, len(flat), 4):
        address, channel, pixel, dtype = flat[at : at + 4]
        strides = (0, channel, 0, 0)
        if by_pixels:
            strides = (p.out_h * p.out_w * pixel, channel, p.out_w * pixel, pixel)
        elif pixel:
            assert (channel, pixel) == (p.out_h * p.out_w, 1)
            assert not p.channels_last
            strides = (p.out_channels * channel, channel, p.out_w, 1)
        found.append(tensor_at(address, shape, strides, dtype).float())
    return found


def install(patch: pytest.MonkeyPatch) -> ConvBinding:
    """Let the operators' CUDA kernels run on host memory through a new `ConvBinding`."""
    binding = ConvBinding()
    loaded = _loader.Native(binding, None)
    for module in (support, _conv_launch, _conv_packed, conv_calls):
        patch.setattr(module, "native", lambda: loaded)
    patch.setattr(support, "device_problem", lambda index: None)
    patch.setattr(support, "device_props", lambda index: SimpleNamespace(index=index))
    patch.setattr(_conv_launch, "raw_stream", lambda index: 77)
    simulated.hide_devices(patch)
    _launch.clear_caches()
    return binding
