"""Planes of a frozen weight, and their order with other streams."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pycutfuse import support
from pycutfuse._loader import native


@dataclass
class _Order:
    stream: int  # raw handle of the stream that wrote the planes
    event: Any  # torch.cuda.Event, untyped; None once the planes are known to be complete


# By address of the planes. It lives here and not on the module because a compiled graph hands only
# tensors to the operator. An entry outlives its planes until the address is used again: harmless,
# a wait too much.
_orders: dict[int, _Order] = {}
_lock = threading.Lock()


def _current_stream(index: int) -> int:
    stream: int = torch.cuda.current_stream(index).cuda_stream
    return stream


# Handle of the current CUDA stream of a device. torch's own costs a third; CPU builds lack it.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


def why_not_frozen(weight: Tensor) -> str | None:
    """Say why no planes can be made of `weight`, or None."""
    if not weight.is_cuda:
        return f"{weight.device.type} tensors"
    if weight.dtype is not torch.float32:  # 16-bit ones are multiplied as they are
        return f"dtype {weight.dtype}".replace("torch.", "")
    if type(weight) not in (Tensor, torch.nn.Parameter) or weight.dim() != 2:
        return f"weight is a {type(weight).__name__} of {weight.dim()} dimensions"
    return support.device_problem(weight.get_device())


def make_planes(weight: Tensor, tier: str) -> tuple[Tensor, Tensor]:
    """Split `weight` (N, K) on the current stream; `why_not_frozen` has accepted it.

    Returns
    -------
    planes : Tensor
        uint8 (planes, N, bytes of a row), the fp16 planes of `tier` as include/cutfuse/split.h lays
        them out: two at ``"ieee"`` (the first is the one of ``"tf32"``), one at ``"tf32"``.
    words : Tensor
        int32 (N,), exponents and flags of the rows.
    """
    index = weight.get_device()
    weight = weight.resolve_neg()  # the split reads memory
    rows, k = weight.shape
    binding = native().binding
    count = support.plane_count(weight.dtype, tier)
    leading, _, word_bytes = binding.planes_layout(rows, k, count)
    planes = torch.empty(count, rows, 2 * leading, dtype=torch.uint8, device=weight.device)
    words = torch.empty(word_bytes // 4, dtype=torch.int32, device=weight.device)
    stream = raw_stream(index)
    if rows and k:
        binding.split(
            weight.data_ptr(),
            *weight.stride(),
            rows,
            k,
            count,
            planes.data_ptr(),
            words.data_ptr(),
            support.device_props(index),
            stream,
        )
    with _lock:
        _orders[planes.data_ptr()] = _Order(stream, torch.cuda.current_stream(index).record_event())
    return planes, words


def forget(planes: Tensor) -> None:
    """Drop the order of planes that are about to be freed."""
    with _lock:
        _orders.pop(planes.data_ptr(), None)


def order(planes: Tensor, words: Tensor, index: int, stream: int) -> None:
    """Let `stream` (current on device `index`) wait for the planes, and keep them alive for it."""
    entry = _orders.get(planes.data_ptr())
    if entry is None or entry.stream == stream:
        return
    current = torch.cuda.current_stream(index)
    planes.record_stream(current)
    words.record_stream(current)
    event = entry.event
    if event is None or torch.cuda.is_current_stream_capturing():
        # A captured stream must not wait for work outside its capture, and need not:
        # torch.cuda.graph synchronises before it begins, and freeze() refuses to run inside.
        return
    if event.query():
        entry.event = None
    else:
        current.wait_event(event)
