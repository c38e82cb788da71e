"""Host time of an eager call, over an empty launch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pycutfuse import nn as fused_nn
from pycutfuse.bench.results import HostOverhead
from pycutfuse.bench.statistics import percentile
from pycutfuse.config import precision
from pycutfuse.explaining import explain

_cuda: Any = torch.cuda  # partly untyped

SIZE = 64
"""Rows and features of the tiny problem: the GPU is always done before the host."""

CALLS = 50
"""Calls between synchronisations: too few to fill the launch queue, which would block the host."""


def host_overhead(device: torch.device, repeats: int = 40) -> HostOverhead:
    """Measure Linear with a bias on 64x64x64, with and without recording for backward."""
    linear = nn.Linear(SIZE, SIZE, device=device)
    fused = fused_nn.Linear(SIZE, SIZE, device=device)
    fused.load_state_dict(linear.state_dict())
    x = torch.rand(SIZE, SIZE, device=device)

    def median(call: Callable[[], object]) -> float:
        return percentile(host_samples(call, torch.cuda.synchronize, repeats), 50)

    with precision("ieee"):
        with torch.no_grad():
            empty = median(lambda: _cuda._sleep(0))
            ours_no_grad = median(lambda: fused(x))
            eager_no_grad = median(lambda: linear(x))
            ran = str(explain(fused, x))
        return HostOverhead(
            empty_launch=empty,
            ours_no_grad=ours_no_grad,
            ours_grad=median(lambda: fused(x)),
            eager_no_grad=eager_no_grad,
            eager_grad=median(lambda: linear(x)),
            ran=ran,
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
