"""Poisoned, guarded allocations, and awkward but valid inputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pycutfuse._knobs import knobs

CANARY = 0xA5
GUARD = 4096  # bytes before and after; a multiple of every alignment in use


class GuardError(AssertionError):
    """A kernel wrote outside the memory it was given."""


class Guards:
    """The guarded allocations of one `guarded` block."""

    def __init__(self) -> None:
        self.arenas: list[tuple[Tensor, int]] = []

    def empty(self, *shape: int, dtype: torch.dtype, device: Any) -> Tensor:
        """As torch.empty, filled with 0xFF (NaN in every float type) between two canaries."""
        count = 1
        for size in shape:
            count *= size
        length = count * dtype.itemsize
        arena = torch.full((length + 2 * GUARD,), CANARY, dtype=torch.uint8, device=device)
        inner = arena[GUARD : GUARD + length]
        inner.fill_(0xFF)
        self.arenas.append((arena, length))
        return inner.view(dtype).view(shape)

    def check(self) -> None:
        """Raise `GuardError` if a canary changed."""
        for at, (arena, length) in enumerate(self.arenas):
            for name, part in (("before", arena[:GUARD]), ("after", arena[GUARD + length :])):
                wrong = (part != CANARY).nonzero()
                if wrong.numel():
                    first = int(wrong[0])
                    raise GuardError(
                        f"allocation {at} of {length} bytes: {wrong.numel()} bytes {name} it were "
                        f"written, the first at offset {first} of {part.numel()}"
                    )


@contextmanager
def guarded() -> Iterator[Guards]:
    """Poison outputs and workspaces of all launches, and check their surroundings at the end.

    Raises
    ------
    GuardError
        On leaving, if a kernel wrote outside its memory.

    Examples
    --------
    >>> import torch
    >>> with guarded() as guards:
    ...     bool(guards.empty(2, dtype=torch.float32, device="cpu").isnan().all())
    True
    """
    guards = Guards()
    outer = knobs.empty
    knobs.empty = guards.empty
    try:
        yield guards
    finally:
        knobs.empty = outer
    guards.check()


LAYOUTS = ("contiguous", "transposed", "offset", "gapped")


def strided(tensor: Tensor, layout: str) -> Tensor:
    """An equal 2-D tensor whose memory is laid out otherwise; gaps hold NaN.

    Parameters
    ----------
    tensor : Tensor
        ``(M, N)``.
    layout : {"contiguous", "transposed", "offset", "gapped"}
        Column-major; one element past an aligned address; every second column of wider rows.

    Examples
    --------
    >>> import torch
    >>> strided(torch.ones(2, 3), "transposed").stride()
    (1, 2)
    """
    rows, columns = tensor.shape
    if layout == "contiguous":
        return tensor.contiguous()
    if layout == "transposed":
        return tensor.t().contiguous().t()
    if layout == "offset":
        arena = tensor.new_full((rows * columns + 1,), float("nan"))
        made = arena[1:].view(rows, columns)
    elif layout == "gapped":
        made = tensor.new_full((rows, 2 * columns + 3), float("nan"))[:, 1 : 2 * columns : 2]
    else:
        raise ValueError(f"layout is {layout!r}; use one of {', '.join(LAYOUTS)}")
    made.copy_(tensor)
    return made
