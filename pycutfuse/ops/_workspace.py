"""Memory of one launch: its result and its scratch."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

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
_is_deterministic = torch._C._get_deterministic_algorithms

Blank = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]  # shape, strides


def is_direct(index: int) -> bool:
    """Whether memory for work on device `index` may be taken past torch's dispatcher, now."""
    return (
        knobs.empty is _empty
        and _current_device() == index  # where such memory comes from
        and not _is_deterministic()  # which fills what empty returns
    )


@lru_cache(maxsize=8)
def blank_of(kind: str) -> Blank | None:
    """torch's empty_strided on the current device of type `kind`, for calls that are `is_direct`.

    Half of torch.empty's time is its way through parser and dispatcher; compiled graphs of torch
    take their memory by this one. It is private to torch, so it is tried before it is trusted.
    """
    try:
        made: Blank = getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}")
        for shape, strides in (((), ()), ((2, 3), (3, 1))):
            tensor = made(shape, strides, torch.float16)
            found = (type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            if found != (Tensor, shape, strides, torch.float16) or tensor.device.type != kind:
                return None
    except Exception:  # renamed, removed or changed: it is only a shortcut
        return None
    return made


def scratch(
    size: int, device: torch.device, stream: int, direct: bool
) -> tuple[int, torch.Tensor | None]:
    """`allocate` for a caller that knows whether it `is_direct`."""
    if direct and _allocate is not None:
        return _allocate(size, stream), None
    owner = knobs.empty(size, dtype=torch.uint8, device=device)
    return owner.data_ptr(), owner


def allocate(
    size: int, index: int, device: torch.device, stream: int
) -> tuple[int, torch.Tensor | None]:
    """Address of `size` bytes for work queued on the current stream `stream`, and their owner.

    Without an owner the memory goes back by `release`, as soon as the work is queued: the
    allocator gives it to nobody but later work of the same stream.
    """
    return scratch(size, device, stream, is_direct(index))
