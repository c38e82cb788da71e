"""Shapes of x and weights: round, odd, of size one, N-dimensional, empty."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SizeCase:
    """Leading dimensions of x, in_features K and out_features N."""

    leading: tuple[int, ...]
    k: int
    n: int

    @property
    def m(self) -> int:
        """Rows of the flattened x."""
        rows = 1
        for size in self.leading:
            rows *= size
        return rows

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.leading)) or 'vector'}-k{self.k}-n{self.n}"


SMALL = [
    SizeCase((16,), 8, 24),
    SizeCase((5,), 7, 3),
    SizeCase((), 6, 4),
    SizeCase((2, 3), 5, 4),
    SizeCase((2, 1, 3), 4, 5),
    SizeCase((1,), 1, 1),
    SizeCase((3,), 1, 2),
    SizeCase((3,), 4, 1),
]
EMPTY = [
    SizeCase((0,), 4, 3),
    SizeCase((3,), 0, 4),
    SizeCase((3,), 4, 0),
    SizeCase((2, 0), 4, 3),
]
# For kernels: full tiles, ragged edges on every side, K around 64 and off multiples of 8.
KERNEL = [
    SizeCase((256,), 256, 256),
    SizeCase((1,), 64, 128),
    SizeCase((128,), 65, 64),
    SizeCase((333,), 129, 517),
    SizeCase((97,), 127, 65),
    SizeCase((130,), 1000, 10),
    SizeCase((3, 43), 72, 200),
    SizeCase((1024,), 2050, 384),
    SizeCase((2048,), 200, 2049),
    SizeCase((33,), 8200, 40),
]
