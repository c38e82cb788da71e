"""Tensors and dimensions for logsumexp: every reading of memory, ragged, of size one, empty."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Make = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ReduceCase:
    """A contiguous shape, a view of it, and the dimensions of the view to reduce."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    view: Make = lambda x: x
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name or 'plain'}-{'x'.join(map(str, self.shape)) or 'scalar'}-{self.dims}"

    def draw(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """randn on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        return self.view(torch.randn(self.shape, generator=generator).to(dtype))


def _view(name: str, shape: tuple[int, ...], dims: tuple[int, ...], view: Make) -> ReduceCase:
    return ReduceCase(shape, dims, view, name)


PLAIN = [
    ReduceCase((5, 7), (1,)),
    ReduceCase((5, 7), (0,)),
    ReduceCase((5, 7), (0, 1)),
    ReduceCase((9,), (0,)),
    ReduceCase((), ()),
    ReduceCase((4, 3, 5), (1,)),
    ReduceCase((4, 3, 5), (0, 2)),
    ReduceCase((2, 3, 4, 5), (0, 2)),
    ReduceCase((2, 3, 4, 5), (1, 3)),
    ReduceCase((2, 3, 4, 5), (0, 2, 3)),
    ReduceCase((1, 6, 1), (0,)),
    ReduceCase((1, 6, 1), (1,)),
    ReduceCase((1, 1), (0, 1)),
    ReduceCase((3, 300), (1,)),
    ReduceCase((300, 3), (0,)),
]
VIEWS = [
    _view("transposed", (5, 7), (1,), lambda x: x.t()),
    _view("transposed", (5, 7), (0,), lambda x: x.t()),
    _view("gapped", (6, 20), (1,), lambda x: x[:, ::2]),
    _view("gapped", (6, 20), (0,), lambda x: x[:, ::2]),
    _view("offset", (6, 20), (1,), lambda x: x[1:, 3:]),
    _view("expanded_rows", (1, 20), (1,), lambda x: x.expand(6, 20)),
    _view("expanded_reduced", (6, 1), (1,), lambda x: x.expand(6, 20)),
    _view("expanded_all", (1, 1), (0,), lambda x: x.expand(6, 20)),
    _view("permuted", (3, 4, 5), (1,), lambda x: x.permute(2, 0, 1)),
    _view("permuted", (3, 4, 5), (0, 2), lambda x: x.permute(2, 0, 1)),
    _view("channels_last", (2, 4, 5, 3), (1,), lambda x: x.permute(0, 3, 1, 2)),
    _view("channels_last", (2, 4, 5, 3), (0, 2, 3), lambda x: x.permute(0, 3, 1, 2)),
    _view("windows", (30,), (1,), lambda x: x.unfold(0, 8, 2)),
]
EMPTY = [
    ReduceCase((0,), (0,)),
    ReduceCase((3, 0), (1,)),
    ReduceCase((3, 0), (0,)),
    ReduceCase((0, 3), (0, 1)),
    ReduceCase((2, 0, 3), (0, 2)),
    ReduceCase((2, 0, 3), (1,)),
]
# For kernels: both readings, every number of threads of a row, vectors or not, splits, ragged.
KERNEL = [
    ReduceCase((4096, 10), (1,)),
    ReduceCase((5000, 7), (1,)),
    ReduceCase((3000, 64), (1,)),
    ReduceCase((70000, 100), (1,)),
    ReduceCase((70000, 128), (1,)),
    ReduceCase((16384, 1000), (1,)),
    ReduceCase((16384, 1024), (1,)),
    ReduceCase((300, 5001), (1,)),
    ReduceCase((2000, 8192), (1,)),
    ReduceCase((3, 1000003), (1,)),
    ReduceCase((1, 1 << 22), (1,)),
    ReduceCase((10, 4096), (0,)),
    ReduceCase((64, 3000), (0,)),
    ReduceCase((1000, 16384), (0,)),
    ReduceCase((200003, 3), (0,)),
    ReduceCase((100000, 40), (0,)),
    ReduceCase((33, 21, 500), (1,)),
    ReduceCase((64, 19, 56, 56), (1,)),
    ReduceCase((64, 19, 56, 56), (0, 2, 3)),
    ReduceCase((64, 19, 56, 56), (2, 3)),
    ReduceCase((32, 33, 34, 35), (0, 2)),
    ReduceCase((32, 33, 34, 35), (1, 3)),
    _view("transposed", (5000, 700), (1,), lambda x: x.t()),
    _view("transposed", (5000, 700), (0,), lambda x: x.t()),
    _view("gapped", (500, 2001), (1,), lambda x: x[:, 1::2]),
    _view("gapped", (500, 2001), (0,), lambda x: x[:, 1::2]),
    _view("offset", (500, 2048), (1,), lambda x: x[:, 1:]),
    _view("channels_last", (8, 56, 56, 64), (1,), lambda x: x.permute(0, 3, 1, 2)),
    _view("expanded", (100, 1), (1,), lambda x: x.expand(100, 3000)),
]
