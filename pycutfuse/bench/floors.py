"""What a case cannot be faster than: bytes moved or tensor-core work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pycutfuse.bench.tiers import TIERS

COPY_BYTES_PER_S = 4.3e12
"""Measured device-to-device copy rate of an H200."""

FP16_FLOP_PER_S = 700e12
"""Sustained fp16 tensor-core rate, measured on an H200 at its power cap."""


@dataclass(frozen=True)
class Work:
    """Bytes and operations of one call, each input read once and each output written once.

    Attributes
    ----------
    bytes : int
        Inputs, parameters and output.
    flop : int
        Two for each product of the contractions.
    """

    bytes: int
    flop: int

    def floor(self, tier: str) -> tuple[float, str]:
        """Seconds, and which of ``"bytes"`` and ``"work"`` decides.

        Examples
        --------
        >>> seconds, kind = Work(bytes=604_000_000, flop=2 * 16384 * 4096 * 4096).floor("ieee")
        >>> f"{seconds * 1e3:.2f} ms, {kind}"
        '2.36 ms, work'
        """
        moving = self.bytes / COPY_BYTES_PER_S
        working = TIERS[tier].products * self.flop / FP16_FLOP_PER_S
        return (moving, "bytes") if moving >= working else (working, "work")


def planes_bytes(contractions: Sequence[tuple[int, int, int]], planes: int) -> int:
    """Bytes of the fp16 planes of all operands: rows of 8 elements' multiples, a word for each.

    Examples
    --------
    >>> planes_bytes([(16384, 4096, 4096)], 2)
    335626240
    """

    def operand(rows: int, k: int) -> int:
        return planes * rows * (-(-k // 8) * 8) * 2 + (-(-rows // 4) * 4) * 4

    if planes == 0:
        return 0
    return sum(operand(m, k) + operand(n, k) for m, n, k in contractions)
