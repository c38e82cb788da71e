"""How kernels read tensors as matrices: strides, and copies of what they cannot read in place."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pycutfuse.support import dtype_code

ALIGNMENT = 16  # bytes, of 16-bit x and weight: address and row stride


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as an (M, N) matrix: strides in elements, after a copy or not."""

    row_stride: int
    col_stride: int
    copy: bool


@dataclass(frozen=True, slots=True)
class Operands:
    """What _C.run takes of a program's operands, addresses left 0; which are copied before it."""

    flat: list[int]  # address, row stride, column stride, dtype of each
    copies: tuple[int, ...]
    shape: tuple[int, ...]  # to which they are broadcast


def collapse(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int] | None:
    """Strides of a (.., N) tensor as an (M, N) matrix, None if its leading dimensions do not merge.

    Examples
    --------
    >>> collapse((4, 5, 6), (30, 6, 1))
    (6, 1)
    >>> collapse((4, 5, 6), (6, 24, 1)) is None
    True
    """
    row_stride, rows = 0, 1
    for size, step in zip(reversed(shape[:-1]), reversed(stride[:-1]), strict=True):
        if size == 1:
            continue
        if rows == 1:
            row_stride, rows = step, size
        elif step == row_stride * rows:
            rows *= size
        else:
            return None
    return row_stride, stride[-1]


def view_of(tensor: Tensor, out_shape: Sequence[int]) -> View:
    """How to read `tensor`, broadcast to `out_shape`, as a matrix."""
    expanded = tensor.expand(tuple(out_shape))
    strides = tuple(
        0 if size == 1 else step
        for size, step in zip(expanded.shape, expanded.stride(), strict=True)
    )
    merged = collapse(tuple(out_shape), strides)
    if merged is None:
        return View(out_shape[-1], 1, True)
    return View(*merged, False)


def padded(k: int) -> int:
    """Elements between the rows of a 16-bit copy: whole `ALIGNMENT`s."""
    return -(-k // 8) * 8


def any_view(tensor: Tensor) -> View:
    """How what reads any strides reads x or weight (.., K), neither empty."""
    merged = collapse(tensor.shape, tensor.stride())
    return View(tensor.shape[-1], 1, True) if merged is None else View(*merged, False)


def factor_view(tensor: Tensor) -> View:
    """How the contraction reads x or weight (.., K), neither empty.

    Any strides at float32. 16-bit tensors need K contiguous and rows whole `ALIGNMENT`s apart;
    their address is looked at when they are launched.
    """
    if tensor.itemsize == 4:
        return any_view(tensor)
    k = tensor.shape[-1]
    merged = collapse(tensor.shape, tensor.stride())
    if merged is not None:
        row_stride, col_stride = merged
        if tensor.numel() == k:
            row_stride = padded(k)  # of one row: nothing lies there
        if (col_stride == 1 or k == 1) and row_stride % 8 == 0 and row_stride >= k:
            return View(row_stride, 1, False)
    return View(padded(k), 1, True)


def copy_rows(tensor: Tensor, row_stride: int) -> Tensor:
    """Copy (.., K) so that K is contiguous and its rows are `row_stride` apart."""
    rows = tensor.new_empty((*tensor.shape[:-1], row_stride))
    return rows.narrow(-1, 0, tensor.shape[-1]).copy_(tensor)


def operands_of(operands: Sequence[Tensor], out_shape: Sequence[int]) -> Operands:
    """How to read a program's operands over an (.., N) result."""
    flat: list[int] = []
    copies = []
    for at, operand in enumerate(operands):
        view = view_of(operand, out_shape)
        flat += (0, view.row_stride, view.col_stride, dtype_code(operand.dtype))
        if view.copy:
            copies.append(at)
    return Operands(flat, tuple(copies), tuple(out_shape))


def copied(layout: Operands, operands: Sequence[Tensor]) -> list[Tensor]:
    """`operands`, those of ``layout.copies`` in memory that one pair of strides can read."""
    found = list(operands)
    for at in layout.copies:
        found[at] = found[at].expand(layout.shape).contiguous()
    return found


_data_ptr = Tensor.data_ptr


def addresses(layout: Operands, operands: Sequence[Tensor]) -> list[int]:
    """``layout.flat`` with the addresses of `operands`, which `copied` has seen."""
    flat = layout.flat.copy()
    flat[::4] = map(_data_ptr, operands)
    return flat
