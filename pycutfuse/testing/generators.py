"""Seeded data. Positive data (rand, lognormal) shows truncation that randn hides."""

from collections.abc import Sequence

import torch
from torch import Tensor

DISTRIBUTIONS = ("rand", "randn", "lognormal")


def generate(
    distribution: str,
    shape: Sequence[int],
    *,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw a tensor, the same on every device: it is drawn on the CPU.

    Parameters
    ----------
    distribution : {"rand", "randn", "lognormal"}
        Uniform on [0, 1), standard normal, or exp of it.

    Examples
    --------
    >>> generate("rand", (2, 3), seed=0).shape
    torch.Size([2, 3])
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution is {distribution!r}; use one of {', '.join(DISTRIBUTIONS)}")
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand if distribution == "rand" else torch.randn
    value = draw(tuple(shape), generator=generator, dtype=dtype)
    if distribution == "lognormal":
        value = value.exp()
    return value.to(device)


def integers(
    shape: Sequence[int], *, seed: int, limit: int = 3, device: torch.device | str = "cpu"
) -> Tensor:
    """float32 whole numbers in [-limit, limit]: products and sums of few of them are exact.

    Examples
    --------
    >>> float(integers((100,), seed=0).abs().max())
    3.0
    """
    generator = torch.Generator().manual_seed(seed)
    value = torch.randint(-limit, limit + 1, tuple(shape), generator=generator)
    return value.to(device=device, dtype=torch.float32)
