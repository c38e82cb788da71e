"""What one call uses besides time: peak memory, and the clocks that it runs at."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from pycutfuse.bench import environment
from pycutfuse.bench.timing import Variant


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all elements.

    Examples
    --------
    >>> tensor_bytes([torch.zeros(3), torch.zeros(2, dtype=torch.float16)])
    16
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def peak_bytes(variant: Variant) -> int:
    """Most bytes that one call holds on top of what was there before it, its result included."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad(), variant.context():
        result = variant.call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def clocks_under_load(
    variant: Variant, seconds: float, slice_s: float = 0.02
) -> dict[str, float] | None:
    """Clocks while the variant, `seconds` a call, runs back to back until nvidia-smi answers."""
    calls = max(1, round(slice_s / seconds))
    with (
        ThreadPoolExecutor(1) as pool,
        torch.no_grad(),
        variant.context(),
    ):
        answer = pool.submit(environment.clocks)
        while not answer.done():
            for _ in range(calls):
                variant.call()
            torch.cuda.synchronize()
        return answer.result()


def release() -> None:
    """Give memory that nothing refers to back to the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
