"""Tensors as recipes: shape, dtype, data and memory layout, drawn again from a seed at any time."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

FILLS = (
    *("randn", "rand", "lognormal", "integers", "zeros", "zero_rows", "away_from_zero"),
    *("rows", "planes", "images", "wide"),
)
LAYOUTS = (
    "transposed",
    "swapped",
    "offset",
    "padded",
    "sliced",
    "stepped",
    "expanded",
    "constant",
)
IMAGE_LAYOUTS = (*LAYOUTS, "channels_last", "channels_last", "gray")
_SHARED = {"rows": 1, "planes": 2, "images": 3}  # last dimensions that share a scale
INTEGER_LIMIT = 3
_INF, _NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class TensorRecipe:
    """One tensor of a configuration.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
        Name in torch.
    fill : str
        One of ``FILLS``: ``rows`` scales rows, ``planes`` and ``images`` the last two and three
        dimensions, and ``wide`` elements, by 2^±span; ``away_from_zero`` is uniform on ±[0.5, 1.5).
    layout : str
        ``contiguous`` or one of ``IMAGE_LAYOUTS``; gaps hold NaN.
    span : int
        See `fill`.
    exponent : int
        Data are multiplied by 2^exponent.
    specials : int
        So many elements become NaN, inf and -inf in turn.
    on_cpu : bool
        It stays on the CPU, as a 0-dim operand may.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    fill: str = "randn"
    layout: str = "contiguous"
    span: int = 0
    exponent: int = 0
    specials: int = 0
    on_cpu: bool = False

    def make(self, seed: int, device: torch.device) -> Tensor:
        """Draw it on `device` (the data differ between CPU and GPU)."""
        if self.on_cpu:
            device = torch.device("cpu")
        generator = torch.Generator(device).manual_seed(seed)
        value = self._drawn(generator, device) * 2.0**self.exponent
        value = value.to(getattr(torch, self.dtype))
        if self.specials and value.numel():
            at = torch.randint(value.numel(), (self.specials,), generator=generator, device=device)
            kinds = torch.tensor([_NAN, _INF, -_INF], dtype=value.dtype, device=device)
            value.view(-1)[at] = kinds[torch.arange(self.specials, device=device) % 3]
        return lay_out(value, self.layout)

    def _drawn(self, generator: torch.Generator, device: torch.device) -> Tensor:
        shape = self.shape

        def uniform(*sizes: int) -> Tensor:
            return torch.rand(sizes, generator=generator, device=device)

        if self.fill == "rand":
            return uniform(*shape)
        if self.fill == "integers":
            limit = INTEGER_LIMIT
            drawn = torch.randint(-limit, limit + 1, shape, generator=generator, device=device)
            return drawn.float()
        if self.fill == "away_from_zero":
            sign = torch.where(uniform(*shape) < 0.5, -1.0, 1.0)
            return (uniform(*shape) + 0.5) * sign
        if self.fill == "zeros":
            return torch.zeros(shape, device=device)
        value = torch.randn(shape, generator=generator, device=device)
        if self.fill == "lognormal":
            return value.exp()
        if self.fill in _SHARED or self.fill == "wide":
            shared = _SHARED.get(self.fill, 0)
            places = (*shape[: len(shape) - shared], *(1,) * shared)
            return value * torch.exp2(((uniform(*places) * 2 - 1) * self.span).round())
        if self.fill == "zero_rows":
            return value * (uniform(*shape[:-1], 1) < 0.5)
        if self.fill != "randn":
            raise ValueError(f"fill is {self.fill!r}; use one of {', '.join(FILLS)}")
        return value


def lay_out(value: Tensor, layout: str) -> Tensor:
    """`value` in another memory layout; only those that expand one slice of it change the data."""
    if layout == "contiguous" or value.dim() == 0:
        return value
    shape = value.shape
    if layout == "transposed":
        order = tuple(reversed(range(value.dim())))
        return value.permute(order).contiguous().permute(order)
    if layout == "swapped":
        return (
            value.transpose(0, -2 if value.dim() > 1 else 0)
            .contiguous()
            .transpose(0, -2 if value.dim() > 1 else 0)
        )
    if layout == "expanded":
        return value[:1].expand(shape) if shape[0] else value
    if layout == "constant":
        return value[..., :1].expand(shape) if shape[-1] else value
    if layout == "channels_last":
        return value.movedim(-3, -1).contiguous().movedim(-1, -3) if value.dim() > 2 else value
    if layout == "gray":
        return value[..., :1, :, :].expand(shape) if value.dim() > 2 and shape[-3] else value
    last = shape[-1]
    if layout == "offset":
        made = value.new_full((value.numel() + 3,), _NAN)[3:].view(shape)
    elif layout == "padded":
        made = value.new_full((*shape[:-1], last + 5), _NAN)[..., :last]
    elif layout == "sliced":
        made = value.new_full((*shape[:-1], 2 * last + 3), _NAN)[..., 1 : 2 * last : 2]
    elif layout == "stepped":
        made = value.new_full((2 * shape[0], *shape[1:]), _NAN)[::2]
    else:
        raise ValueError(f"layout is {layout!r}; use one of {', '.join(IMAGE_LAYOUTS)}")
    return made.copy_(value)


def draw_layout(rng: random.Random, plain: float = 0.5, layouts: tuple[str, ...] = LAYOUTS) -> str:
    """``contiguous`` with probability `plain`, else one of `layouts`."""
    return "contiguous" if rng.random() < plain else rng.choice(layouts)
