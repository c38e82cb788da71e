"""Tails by name: the recipe that is drawn, its torch chain, and its envelope."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pycutfuse import nn
from pycutfuse.testing.repro.envelope import Envelope, as_rows, clean, of_rows
from pycutfuse.testing.repro.tensors import TensorRecipe

# Unit roundoffs of normalising one value, and relative ones of a column's standard deviation.
_APPLY, _DEVIATION = 8.0, 16.0


@dataclass
class Statistics:
    """Tensors and numbers of a batch norm. Forwards change the running statistics in place."""

    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None
    var: Tensor | None
    count: Tensor | None
    momentum: float | None
    eps: float
    training: bool

    def copy(self, dtype: torch.dtype | None = None) -> Statistics:
        """Running statistics with memory of their own, the rest shared unless it changes dtype."""

        def own(tensor: Tensor | None, clone: bool) -> Tensor | None:
            if tensor is None or not tensor.is_floating_point():
                return None if tensor is None else tensor.clone()
            converted = tensor if dtype is None else tensor.to(dtype)
            return converted.clone() if clone and converted is tensor else converted

        return Statistics(
            own(self.weight, False),
            own(self.bias, False),
            own(self.mean, True),
            own(self.var, True),
            own(self.count, True),
            self.momentum,
            self.eps,
            self.training,
        )

    def running(self) -> dict[str, Tensor]:
        """What training updates, by name."""
        named = {"running_mean": self.mean, "running_var": self.var, "count": self.count}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass(frozen=True)
class BatchNorm:
    """Tail ``batch_norm``.

    `affine`, `track` and `momentum` are nn.BatchNorm1d's and 2d's. Without `track` the batch's own
    statistics are used, so `training` must be set.
    """

    training: bool = True
    affine: bool = True
    track: bool = True
    momentum: float | None = 0.1
    eps: float = 1e-5
    batches: int = 0  # num_batches_tracked before the call
    dtype: str = "float32"

    @classmethod
    def draw(cls, rng: random.Random, dtype: str) -> BatchNorm:
        track = rng.random() < 0.8
        if dtype in ("float16", "bfloat16") and rng.random() < 0.5:
            dtype = "float32"  # as under autocast; torch takes it
        return cls(
            training=rng.random() < 0.7 or not track,
            affine=rng.random() < 0.7,
            track=track,
            momentum=rng.choice((0.1, 0.1, None, 0.0, 1.0, 0.37)),
            eps=rng.choice((1e-5, 1e-5, 1e-3, 1e-2)),
            batches=rng.choice((0, 1, 41)),
            dtype=dtype,
        )

    def make(self, n: int, seed: int, device: torch.device) -> Statistics:
        """Tensors for `n` channels."""

        def tensor(fill: str, number: int) -> Tensor:
            return TensorRecipe((n,), self.dtype, fill).make(seed + number, device)

        count = torch.tensor(self.batches, device=device) if self.track else None
        return Statistics(
            tensor("away_from_zero", 0) if self.affine else None,
            tensor("randn", 1) if self.affine else None,
            tensor("randn", 2) if self.track else None,
            tensor("rand", 3) + 0.25 if self.track else None,
            count,
            self.momentum,
            self.eps,
            self.training,
        )


@dataclass(frozen=True)
class LogSumExp:
    """Tail ``logsumexp`` over the last dimension."""

    @classmethod
    def draw(cls, rng: random.Random, dtype: str) -> LogSumExp:
        return cls()


class Tail(Protocol):
    """What a recipe of a tail has besides its fields."""

    @classmethod
    def draw(cls, rng: random.Random, dtype: str) -> Tail:
        """Draw the fields, for a value of `dtype`."""


TAILS: dict[str, type[BatchNorm] | type[LogSumExp]] = {"batch_norm": BatchNorm}
if hasattr(nn, "LinearLogSumExp"):
    TAILS["logsumexp"] = LogSumExp


def batch_norm(z: Tensor, s: Statistics) -> Tensor:
    """nn.BatchNorm1d's or 2d's forward on z, in the words of torch; updates running statistics."""
    factor = 0.0 if s.momentum is None else s.momentum
    if s.training and s.count is not None:
        s.count.add_(1)
        if s.momentum is None:
            factor = 1.0 / float(s.count)
    return F.batch_norm(z, s.mean, s.var, s.weight, s.bias, s.training, factor, s.eps)


def batch_norm_envelope(
    walk: Envelope, s: Statistics, pixel_dims: int = 0
) -> dict[str, tuple[Tensor, Tensor]]:
    """Carry `walk` through a batch norm; `s` in float64.

    `pixel_dims` dimensions follow that of the channels.

    Returns
    -------
    dict
        Running statistics after the call by name: float64 value and error bound.

    Notes
    -----
    A standard deviation is a norm, so errors e of its values move it by at most their rms.
    """
    shape = walk.value.shape
    walk.reshape(lambda t: as_rows(t, pixel_dims))
    running = _of_rows(walk, s)
    walk.reshape(lambda t: of_rows(t, shape, pixel_dims))
    return running


def _of_rows(walk: Envelope, s: Statistics) -> dict[str, tuple[Tensor, Tensor]]:
    """`batch_norm_envelope` of rows (M, channels)."""
    z, error, unit = walk.value, walk.error, walk.rounding.unit
    result = batch_norm(z, updated := s.copy())
    weight = z.new_ones(z.shape[1:]) if s.weight is None else s.weight.abs()
    running: dict[str, tuple[Tensor, Tensor]] = {}
    if s.training:
        mean = z.mean(0)
        deviation = (z.var(0, unbiased=False) + s.eps).sqrt()
        of_mean = [e.mean(0) + _APPLY * unit * z.abs().mean(0) for e in (error, walk.typical)]
        wobble = [
            e.square().mean(0).sqrt() + _DEVIATION * unit * deviation + own
            for e, own in zip((error, walk.typical), of_mean, strict=True)
        ]
        square = z.square().sum(0)
        walk.ambiguous = (
            walk.ambiguous.any(0) | (square >= 0.01 * walk.rounding.largest)
        ).expand_as(z)
        walk.unsure = walk.unsure.any(0).expand_as(z)
        running = _running(s, updated, z, of_mean[0], wobble[0], unit)
    else:
        assert s.mean is not None  # evaluation has running statistics
        assert s.var is not None
        mean, deviation = s.mean, (s.var + s.eps).sqrt()
        of_mean = [torch.zeros_like(mean)] * 2
        wobble = [4 * unit * deviation] * 2
    bias = 0.0 if s.bias is None else s.bias.abs()
    found = []
    for e, of, moved in zip((error, walk.typical), of_mean, wobble, strict=True):
        least = torch.maximum(deviation - moved, torch.full_like(deviation, s.eps**0.5))
        centred = (z - mean).abs()
        own = _APPLY * unit * ((z.abs() + mean.abs()) / deviation * weight + bias)
        shift = ((e + of) / least + centred * moved / (deviation * least)) * weight
        found.append(clean(shift + own + walk.rounding.tiny, result))
    walk.error, walk.typical = found
    walk.value = result
    walk.exact = False
    walk.saturate()
    return running


def _running(
    s: Statistics, updated: Statistics, z: Tensor, of_mean: Tensor, wobble: Tensor, unit: float
) -> dict[str, tuple[Tensor, Tensor]]:
    if s.mean is None or s.var is None or updated.mean is None or updated.var is None:
        return {}
    factor = 0.0 if s.momentum is None else s.momentum
    if s.momentum is None and updated.count is not None:
        factor = 1.0 / float(updated.count)
    rows = z.shape[0]
    unbiased = rows / max(rows - 1, 1)
    var = z.var(0, unbiased=False)
    of_var = (2 * var.sqrt() * wobble + wobble.square()) * unbiased
    own = [
        _APPLY * unit * (old.abs() + new.abs())
        for old, new in ((s.mean, updated.mean), (s.var, updated.var))
    ]
    return {
        "running_mean": (updated.mean, factor * of_mean + own[0]),
        "running_var": (updated.var, factor * of_var + own[1]),
    }


def logsumexp_envelope(walk: Envelope) -> None:
    """Carry `walk` through a logsumexp over the last dimension."""
    unit = walk.rounding.unit
    result = walk.value.logsumexp(-1)
    own = _APPLY * unit * (1 + result.abs()) + walk.rounding.tiny
    found = []
    for error in (walk.error, walk.typical):
        up = (walk.value + error).logsumexp(-1) - result
        found.append(clean(up + own, result))
    walk.error, walk.typical = found
    walk.value = result
    walk.unsure, walk.ambiguous = walk.unsure.any(-1), walk.ambiguous.any(-1)
    walk.exact = False
