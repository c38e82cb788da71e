"""64-bit index arithmetic refuses to overflow."""

import pytest

from .native import host_module

host = host_module()

LIMIT = 2**63
NUMBERS = (
    *(0, 1, -1, 2, 7, 8, 255, 256, 3037000499, 3037000500, 2**31, 2**32, 2**62),
    *(LIMIT - 1, LIMIT - 2, LIMIT - 8, -LIMIT, -LIMIT + 1, -(2**62)),
)


def in_range(value: int) -> int | None:
    return value if -LIMIT <= value < LIMIT else None


@pytest.mark.parametrize("a", NUMBERS)
def test_sum_and_product_are_exact_or_refused(a: int) -> None:
    for b in NUMBERS:
        assert host.checked_add(a, b) == in_range(a + b)
        assert host.checked_multiply(a, b) == in_range(a * b)


@pytest.mark.parametrize("a", NUMBERS)
def test_quotient_and_multiple_round_up(a: int) -> None:
    for b in NUMBERS:
        valid = a >= 0 and b > 0
        assert host.checked_ceil_div(a, b) == (-(-a // b) if valid else None)
        assert host.checked_round_up(a, b) == (in_range(-(-a // b) * b) if valid else None)
