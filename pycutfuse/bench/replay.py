"""GPU time of short calls: many of them in one CUDA graph, replayed."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from pycutfuse.bench import timing
from pycutfuse.bench.timing import Settings, Timing, Variant, scaled

REPLAY = "graph replay"
GRAPH_S = 400e-6
"""Calls of one graph add up to about this much, so that launching it costs nothing beside it."""

LONG_CALL_S = 5e-3
"""A call this long is alone in its graph."""

CHUNK_S = 1e-3
MAX_CALLS = 64


def calls_per_graph(seconds: float, sets: int) -> int:
    """Calls in one graph: a multiple of the input sets that they rotate through.

    Examples
    --------
    >>> calls_per_graph(20e-6, 8), calls_per_graph(1e-6, 3), calls_per_graph(10e-3, 2)
    (24, 66, 2)
    """
    calls = 1 if seconds > LONG_CALL_S else min(MAX_CALLS, math.ceil(GRAPH_S / seconds))
    return -(-calls // sets) * sets


def capture(call: Callable[[], object], calls: int) -> Callable[[], object]:
    """A function that replays `calls` calls, captured in one graph. `call` must be warm."""
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph.replay


def sample(replay: Callable[[], object], slice_s: float) -> tuple[list[float], str]:
    """Seconds per replay over about `slice_s`, launched behind a kernel that hides the launches."""
    seconds = timing.events(replay, 1, 2)[1]
    chunk = max(1, round(CHUNK_S / seconds))
    chunks = max(3, math.ceil(slice_s / (chunk * seconds)))
    timing.backlog(200e-6)
    return timing.events(replay, chunk, chunks), REPLAY


def interleave(
    functions: dict[str, Callable[[], object]], sets: int, settings: Settings
) -> dict[str, Timing]:
    """Time per call of each function, warm, by replay of equal graphs; or with events for all.

    Events, behind a backlog where calls are short, are for functions that cannot be captured.
    """
    with torch.no_grad():
        seconds = max(min(timing.events(call, 1, 4)[1:]) for call in functions.values())
    calls = calls_per_graph(seconds, sets)
    try:
        graphs = {name: capture(call, calls) for name, call in functions.items()}
    except RuntimeError:
        torch.cuda.synchronize()
        plain = [Variant(name, call) for name, call in functions.items()]
        return timing.interleave(plain, settings, timing.sample_cuda)
    variants = [Variant(name, graph) for name, graph in graphs.items()]
    for variant in variants:
        timing.warm_up(variant, 2)
    timings = timing.interleave(variants, settings, sample)
    return {name: scaled(found, 1 / calls) for name, found in timings.items()}
