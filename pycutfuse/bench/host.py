"""Host time of eager calls, over an empty launch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pycutfuse import nn as fused_nn
from pycutfuse.bench.case import like
from pycutfuse.bench.cases import LinearScaleBatchNorm, fuse_scale_batch_norm
from pycutfuse.bench.results import HostOverhead
from pycutfuse.bench.shapes import Shape
from pycutfuse.bench.statistics import percentile
from pycutfuse.config import precision
from pycutfuse.explaining import explain

_cuda: Any = torch.cuda  # partly untyped

SHAPE = Shape(2048, 1024, 1024)
"""Small, but one that our kernels take; PyTorch is expected to be faster below half of it.

The GPU falls behind, which costs the host nothing as long as the launches fit into the queue.
"""

CALLS = 50
"""Calls between synchronisations. The queue holds 1024 launches, and a call makes at most 6; where
it is full it blocks the host."""


def host_overhead(device: torch.device, repeats: int = 40) -> list[HostOverhead]:
    """Measure modules in training mode, with and without recording for backward."""
    with device:
        linear = nn.Linear(SHAPE.k, SHAPE.n)
        chain = LinearScaleBatchNorm(SHAPE)
        x = torch.rand(SHAPE.m, SHAPE.k)
    fused = like(linear, fused_nn.Linear(SHAPE.k, SHAPE.n))
    return [
        _measured("Linear", linear, fused, x, repeats),
        _measured("LinearScaleBatchNorm1d", chain, fuse_scale_batch_norm(chain), x, repeats),
    ]


def _measured(
    name: str, eager: nn.Module, fused: nn.Module, x: torch.Tensor, repeats: int
) -> HostOverhead:
    def median(call: Callable[[], object]) -> float:
        return percentile(host_samples(call, torch.cuda.synchronize, repeats), 50)

    with precision("ieee"):
        with torch.no_grad():
            empty = median(lambda: _cuda._sleep(0))
            ours_no_grad = median(lambda: fused(x))
            eager_no_grad = median(lambda: eager(x))
            ran = str(explain(fused, x))
        return HostOverhead(
            empty_launch=empty,
            ours_no_grad=ours_no_grad,
            ours_grad=median(lambda: fused(x)),
            eager_no_grad=eager_no_grad,
            eager_grad=median(lambda: eager(x)),
            ran=ran,
            module=name,
        )


def host_samples(
    call: Callable[[], object], synchronise: Callable[[], object], repeats: int
) -> list[float]:
    """Seconds of host time per call, `repeats` times, after one round of warming up."""
    samples = []
    for _ in range(repeats + 1):
        synchronise()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        samples.append((time.perf_counter() - begin) / CALLS)
    synchronise()
    return samples[1:]
