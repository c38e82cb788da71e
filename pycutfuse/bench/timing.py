"""Timing on a GPU: variants interleaved in changing order, cold cache, sustained or with a backlog.

All figures are seconds. A long kernel is timed back to back for a slice of time, where the card
reaches its power cap as it would in use. A short one is launched behind a kernel that keeps the
GPU busy, so that events do not time the gaps that the host leaves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Any

import torch

from pycutfuse.bench.statistics import Summary, summarise

_cuda: Any = torch.cuda  # partly untyped

SHORT_KERNEL_S = 100e-6
"""Below this a call is timed behind a backlog."""

CHUNK_S = 5e-3
"""Calls between two events add up to about this much, so that an event's cost does not count."""

ROTATED_BYTES = 120_000_000
"""Input sets are rotated until they exceed this: twice the L2 cache of an H200."""

SLEEP_CYCLES_PER_S = 2e9
"""At least the SM clock, so that a backlog lasts no less than asked for."""


@dataclass(frozen=True)
class Settings:
    """How long to measure.

    Attributes
    ----------
    slice_s : float
        Back-to-back time of one variant before the next has its turn.
    rounds : int
        Turns of each variant, in the order of `turns`.
    """

    slice_s: float = 0.2
    rounds: int = 4


@dataclass(frozen=True)
class Variant:
    """One way to compute a case.

    Attributes
    ----------
    call : callable
        One call, on the next input set.
    context : callable
        Makes the context (global flags) in which `call` runs.
    """

    name: str
    call: Callable[[], object]
    context: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)


@dataclass(frozen=True)
class Timing:
    """Summary of a variant's time per call in seconds, and how it was taken."""

    seconds: Summary
    regime: str


def scaled(timing: Timing, factor: float) -> Timing:
    """A timing with all its seconds multiplied.

    Examples
    --------
    >>> scaled(Timing(Summary(2.0, 1.0, 4.0, 3), "sustained"), 0.5).seconds
    Summary(median=1.0, p20=0.5, p80=2.0, count=3)
    """
    s = timing.seconds
    seconds = Summary(s.median * factor, s.p20 * factor, s.p80 * factor, s.count)
    return Timing(seconds, timing.regime)


def backlog(seconds: float) -> None:
    """Keep the GPU busy for at least so long, while the host launches what is timed."""
    _cuda._sleep(round(seconds * SLEEP_CYCLES_PER_S))


def rotating(
    function: Callable[..., object], sets: Sequence[Sequence[Any]]
) -> Callable[[], object]:
    """A call of `function` without arguments that takes the next set of `sets` each time."""
    turns = cycle(sets)
    return lambda: function(*next(turns))


def sets_needed(bytes_per_set: int, *, at_least: int = 2) -> int:
    """Input sets to rotate so that together they exceed `ROTATED_BYTES`.

    Examples
    --------
    >>> sets_needed(33_554_432)
    4
    """
    return max(at_least, math.ceil(ROTATED_BYTES / max(1, bytes_per_set)))


def turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """The order in which variants are measured.

    Each round begins with another one, and every second is backwards, so that a variant comes after
    different ones but never after itself: what keeps an H200 above its power cap for 0.6 s and more
    is then slowed down by up to a quarter for 0.1 to 0.3 s, to make up for it.

    Examples
    --------
    >>> " ".join(turns("abcd", 4))
    'a b c d a d c b c d a b c b a d'
    """
    for number in range(rounds):
        first = number % len(names)
        turned = [*names[first:], *names[:first]]
        yield from turned if number % 2 == 0 else reversed(turned)


def interleave(
    variants: Sequence[Variant],
    settings: Settings,
    sample: Callable[[Callable[[], object], float], tuple[list[float], str]],
) -> dict[str, Timing]:
    """Measure all variants in turns.

    Parameters
    ----------
    sample : callable
        ``sample(call, slice_s)`` gives seconds per call, several times, and the regime's name;
        `sample_cuda` on a GPU.
    """
    by_name: Mapping[str, Variant] = {variant.name: variant for variant in variants}
    samples: dict[str, list[float]] = {name: [] for name in by_name}
    regimes: dict[str, str] = {}
    for name in turns(list(by_name), settings.rounds):
        variant = by_name[name]
        with torch.no_grad(), variant.context():
            taken, regimes[name] = sample(variant.call, settings.slice_s)
        samples[name] += taken
    return {name: Timing(summarise(samples[name]), regimes[name]) for name in by_name}


def warm_up(variant: Variant, calls: int = 3) -> None:
    """Compile, allocate and plan before anything is timed."""
    with torch.no_grad(), variant.context():
        for _ in range(calls):
            variant.call()
    _cuda.synchronize()


def sample_cuda(call: Callable[[], object], slice_s: float) -> tuple[list[float], str]:
    """Seconds per call over about `slice_s` of GPU time."""
    estimate = events(call, 1, 5)[1:]
    seconds = min(estimate)
    if seconds < SHORT_KERNEL_S:
        return _behind_backlog(call, slice_s), "backlog"
    chunk = max(1, round(CHUNK_S / seconds))
    chunks = max(4, math.ceil(slice_s / (chunk * seconds)))
    samples = events(call, chunk, chunks)
    # The first quarter covers the way down from the boost clock.
    return samples[len(samples) // 4 :], "sustained"


def events(call: Callable[[], object], chunk: int, chunks: int) -> list[float]:
    """Seconds per call of `chunks` chunks of calls, all launched before the host waits."""
    marks = [_cuda.Event(enable_timing=True) for _ in range(chunks + 1)]
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(chunk):
            call()
        mark.record()
    _cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 / chunk for begin, end in pairwise(marks)]


def _behind_backlog(call: Callable[[], object], slice_s: float, chunk: int = 50) -> list[float]:
    host = time.perf_counter()
    for _ in range(chunk):
        call()
    host = time.perf_counter() - host
    _cuda.synchronize()
    samples: list[float] = []
    end = time.perf_counter() + slice_s
    while len(samples) < 5 or time.perf_counter() < end:
        backlog(2 * host + 1e-3)
        samples += events(call, chunk, 1)
    return samples
