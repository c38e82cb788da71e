"""Sizes beside eager PyTorch: random ones of linear layers and convolutions, and a network's."""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pycutfuse._console import progress
from pycutfuse.bench import flags, replay, route, timing, usage
from pycutfuse.bench.case import Case, SizesCase
from pycutfuse.bench.cases import at_shape
from pycutfuse.bench.compare import DISTRIBUTIONS, compare_models, draw_weights
from pycutfuse.bench.conv_breadth import breadth
from pycutfuse.bench.conv_cases import conv2d, random_convolutions, resnet50
from pycutfuse.bench.problem import describe
from pycutfuse.bench.results import (
    COMPILE,
    COMPILE_TUNED,
    EAGER,
    NO_SLOWER,
    OURS,
    SizeResult,
    SizesResult,
)
from pycutfuse.bench.runner import TUNED, Options, draw_input, make_reference
from pycutfuse.bench.shapes import Shape
from pycutfuse.bench.timing import Settings

DEFAULT = "default"
"""Mode of torch.compile."""

MAX_SETS = 8
BIG_BYTES = 256_000_000
"""A size that holds this much gives its memory back before the next one."""

SLICES = Settings(slice_s=0.02, rounds=4)
AGAIN = Settings(slice_s=0.1, rounds=6)
"""Slices of the first timing, and of a loser's second."""


def random_sizes(case: SizesCase) -> list[tuple[int, int, int]]:
    """The (M, N, K) of a case: the same numbers for the same seed.

    Examples
    --------
    >>> random_sizes(SizesCase("sizes", count=2, largest=16384, compiled=0))
    [(3620, 1564, 59), (12, 143, 51)]
    """
    generator = random.Random(case.seed)

    def draw_one() -> int:
        return round(math.exp(generator.uniform(0, math.log(case.largest))))

    return [(draw_one(), draw_one(), draw_one()) for _ in range(case.count)]


def problems(case: SizesCase) -> list[Case]:
    """The problems of a case, in order."""
    if case.family == "resnet50":
        return resnet50(case)
    if case.family == "conv_breadth":
        return breadth(case)
    if case.family == "conv2d":
        return [conv2d(str(shape), shape) for shape in random_convolutions(case)]
    return [at_shape(*size) for size in random_sizes(case)]


def run_sizes(case: SizesCase, options: Options, device: torch.device) -> SizesResult:
    """Verify every size and, on a GPU, time those that pass; losers are timed once more."""
    entries: list[SizeResult] = []
    begin = time.perf_counter()
    with flags.fp32_precision(options.at.tf32):
        in_force = flags.in_force()
        for index, problem in enumerate(problems(case)):
            tuned = TUNED if options.tuned and index < case.compiled else None
            mode = DEFAULT if case.family == "resnet50" else tuned
            compiled = mode if options.compile else None
            try:
                entry = _run(problem, DISTRIBUTIONS[index % 3], compiled, options, device)
            except Exception as error:  # the other sizes are still of interest
                entry = SizeResult(_named(problem), [], failure=describe(error))
            entries.append(entry)
            progress(f"  [{index + 1}/{case.count}] {_line(entry)}")
    progress(f"  {case.count} sizes in {time.perf_counter() - begin:.0f} s")
    usage.release()
    return SizesResult(case.name, options.tier, entries, in_force)


def _run(
    case: Case,
    distribution: str,
    compiled: str | None,
    options: Options,
    device: torch.device,
) -> SizeResult:
    tier = options.at
    reference = make_reference(case, tier, device)
    generator = torch.Generator(device).manual_seed(0)
    draw_weights(reference, distribution, generator)
    x = draw_input(case.shape, distribution, tier, generator)
    fused = case.fused(reference)
    work = case.work(usage.tensor_bytes(reference.parameters()), tier.itemsize)
    with flags.quiet_fallback(device.type == "cpu"):
        checks = compare_models(
            reference,
            fused,
            [x],
            label=distribution,
            training=False,
            limit=tier.limit,
            cudnn=False,
        )
        ran = route.observe(fused, [x])
    floor_s = work.floor(options.tier)[0]
    result = SizeResult(_named(case), checks, ran.path, ran.reason, floor_s)
    if device.type == "cuda" and result.passed:
        result = _timed(result, reference, x, case.fused, compiled)
    del reference, fused, x
    if work.bytes > BIG_BYTES:
        usage.release()
    return result


def _timed(
    result: SizeResult,
    reference: nn.Module,
    x: Tensor,
    fuse: Callable[[nn.Module], nn.Module],
    compiled: str | None,
) -> SizeResult:
    held = usage.tensor_bytes([*reference.parameters(), x])
    # Weights rotate as well: they are the larger part where M is small.
    sets = min(MAX_SETS, timing.sets_needed(held, at_least=1))
    models = [reference, *(copy.deepcopy(reference) for _ in range(sets - 1))]
    inputs = [x, *(x.clone() for _ in range(sets - 1))]
    functions = {EAGER: _each(models, inputs), OURS: _each([fuse(m) for m in models], inputs)}
    if compiled is not None:
        name = COMPILE_TUNED if compiled == TUNED else COMPILE
        functions[name] = _compiled(models, inputs, compiled)
    with torch.no_grad():
        for function in functions.values():
            for _ in range(sets + 1):
                function()
    timings = replay.interleave(functions, sets, SLICES)
    result = _with(result, timings)
    first = result.ratio()
    if first is not None and first < NO_SLOWER:
        rivals = (EAGER, COMPILE, OURS)
        again = replay.interleave({n: functions[n] for n in rivals if n in functions}, sets, AGAIN)
        result = replace(_with(result, {**timings, **again}), first_ratio=first)
    return result


def _with(result: SizeResult, timings: dict[str, timing.Timing]) -> SizeResult:
    times = {name: found.seconds.median for name, found in timings.items()}
    return replace(result, times=times, regime=timings[OURS].regime)


def _each(modules: list[nn.Module], inputs: list[Tensor]) -> Callable[[], object]:
    pairs = list(zip(modules, inputs, strict=True))
    return timing.rotating(lambda module, x: module(x), pairs)


def _compiled(models: list[nn.Module], inputs: list[Tensor], mode: str) -> Callable[[], object]:
    """One graph for all models, whose parameters and buffers are its inputs."""

    def chain(x: Tensor, tensors: dict[str, Tensor]) -> Any:
        return torch.func.functional_call(models[0], tensors, (x,))

    torch.compiler.reset()
    function = torch.compile(chain, mode=mode, dynamic=False)
    states = [dict(model.named_parameters()) | dict(model.named_buffers()) for model in models]
    return timing.rotating(function, list(zip(inputs, states, strict=True)))


def _named(case: Case) -> str:
    """Sizes of a problem: M, N and K in this order, or a convolution's name, which says them."""
    if isinstance(case.shape, Shape):
        return f"{case.shape.m}x{case.shape.n}x{case.shape.k}"
    return case.name


def _line(entry: SizeResult) -> str:
    if entry.failure:
        return f"{entry}: {entry.failure}"
    if not entry.passed:
        return f"{entry}: FAILED, {max(check.ratio for check in entry.checks):.2f} of allowed error"
    rivals = {name: entry.ratio(name) for name in (EAGER, COMPILE, COMPILE_TUNED)}
    speeds = [f", {ratio:.2f}x {name}" for name, ratio in rivals.items() if ratio is not None]
    return f"{entry}: {entry.path}{''.join(speeds)}"
