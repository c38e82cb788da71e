"""What a case cannot be faster than: bytes moved or tensor-core work (PERFORMANCE.md section 1)."""

from __future__ import annotations

from dataclasses import dataclass

COPY_BYTES_PER_S = 4.3e12
"""Measured device-to-device copy rate of an H200."""

FP16_FLOP_PER_S = 700e12
"""Sustained fp16 tensor-core rate, measured on an H200 at its power cap."""

PRODUCTS = {"ieee": 3, "tf32": 1}
"""fp16 products that one product of a tier costs."""


@dataclass(frozen=True)
class Work:
    """Bytes and operations of one call, each input read once and each output written once.

    Attributes
    ----------
    bytes : int
        Inputs, parameters and output.
    flop : int
        2·M·N·K of the contractions.
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
        working = PRODUCTS[tier] * self.flop / FP16_FLOP_PER_S
        return (moving, "bytes") if moving >= working else (working, "work")


def linear_work(m: int, k: int, n: int, parameter_bytes: int, itemsize: int = 4) -> Work:
    """Work of a (m, k) to (m, n) linear layer with pointwise steps or batch normalisation."""
    return Work(bytes=(m * k + m * n) * itemsize + parameter_bytes, flop=2 * m * n * k)
