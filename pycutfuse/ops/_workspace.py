"""Scratch memory of one launch."""

from collections.abc import Callable
from typing import Any

import torch

from pycutfuse._knobs import knobs

# torch's caching allocator without a tensor around the memory, as
# torch.cuda.caching_allocator_alloc calls it: it saves host time. Absent from CPU builds.
_allocate: Callable[[int, int], int] | None = getattr(
    torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None
)
release: Callable[[int], None] = getattr(
    torch._C, "_cuda_cudaCachingAllocator_raw_delete", lambda address: None
)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_empty: Any = torch.empty


def allocate(
    size: int, index: int, device: torch.device, stream: int
) -> tuple[int, torch.Tensor | None]:
    """Address of `size` bytes for work queued on the current stream `stream`, and their owner.

    Without an owner the memory goes back by `release`, as soon as the work is queued: the
    allocator gives it to nobody but later work of the same stream.
    """
    if (
        _allocate is not None
        and knobs.empty is _empty
        and _current_device() == index  # where raw memory comes from
        and not torch.are_deterministic_algorithms_enabled()  # which fill what empty returns
    ):
        return _allocate(size, stream), None
    owner = knobs.empty(size, dtype=torch.uint8, device=device)
    return owner.data_ptr(), owner
