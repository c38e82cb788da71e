"""Planes are padded to what TMA needs, and a size that overflows is refused."""

import pytest

from .native import binding

_C = binding()


@pytest.mark.parametrize("rows", [0, 1, 2, 127, 16384, 2**31 + 1])
@pytest.mark.parametrize("k", [0, 1, 7, 8, 9, 4096, 8191, 2**20 + 3])
@pytest.mark.parametrize("count", [1, 2])
def test_sizes(rows: int, k: int, count: int) -> None:
    leading, plane_bytes, word_bytes = _C.planes_layout(rows, k, count)
    assert leading % 8 == 0
    assert k <= leading < k + 8
    assert plane_bytes == count * rows * leading * 2
    assert 4 * rows <= word_bytes < 4 * rows + 16


@pytest.mark.parametrize(
    ("rows", "k"),
    [(-1, 8), (8, -1), (2**62, 2), (2, 2**62), (2**32, 2**31), (2**63 - 1, 0), (1, 2**63 - 1)],
)
def test_negative_or_overflowing_size(rows: int, k: int) -> None:
    with pytest.raises(ValueError, match="planes") as caught:
        _C.planes_layout(rows, k, 2)
    assert str(rows) in str(caught.value)
    assert str(k) in str(caught.value)


def test_size_beyond_64_bits_is_no_int64() -> None:
    with pytest.raises(TypeError):
        _C.planes_layout(2**64, 1, 2)


@pytest.mark.parametrize("count", [-1, 0, 3])
def test_planes_are_one_or_two(count: int) -> None:
    with pytest.raises(ValueError, match=str(count)):
        _C.planes_layout(8, 8, count)
