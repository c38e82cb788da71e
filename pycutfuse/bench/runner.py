"""Runs cases: verify each, and time it only if it passes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pycutfuse._loader import native
from pycutfuse.bench import environment, flags, timing
from pycutfuse.bench.accuracy import Check
from pycutfuse.bench.cases import Case, ExecutorCase, Shape
from pycutfuse.bench.compare import DISTRIBUTIONS, compare_models, draw, draw_weights
from pycutfuse.bench.floors import Work, linear_work
from pycutfuse.bench.problem import describe
from pycutfuse.bench.results import (
    COMPILE,
    COMPILE_TUNED,
    EAGER,
    EAGER_TF32,
    FROZEN,
    OURS,
    CaseResult,
    ExecutorResult,
    Memory,
)
from pycutfuse.bench.timing import Settings, Timing, Variant
from pycutfuse.config import Precision, precision
from pycutfuse.explaining import explain
from pycutfuse.freezing import freeze

AS_BUILT = "rand, initial weights"
SEED = 0


@dataclass(frozen=True)
class Options:
    """What the user chose.

    Attributes
    ----------
    tier : {"ieee"}
    compile : bool
        Also time torch.compile, which takes up to a minute for each case.
    settings : Settings
        Slices and rounds of timing.
    """

    tier: Precision = "ieee"
    compile: bool = True
    settings: Settings = field(default_factory=Settings)


def progress(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)


def run_case(case: Case, options: Options, device: torch.device) -> CaseResult:
    """Verify a case and, on a GPU and if every check passes, time it."""
    progress(f"  {case.chain}, {case.shape}")
    result = _verified(case, options, device)
    if device.type != "cuda" or not result.passed:
        return result
    reference = _reference(case, device)
    sets = _inputs(case.shape, device)
    variants, compiling = _variants(case, reference, sets, options)
    failures = _warm_up(variants, compiling)
    variants = [variant for variant in variants if variant.name not in failures]
    progress(f"  timing {', '.join(variant.name for variant in variants)}")
    timings = timing.interleave(variants, options.settings, timing.sample_cuda)
    ours = next(variant for variant in variants if variant.name == OURS)
    result = replace(
        result,
        timings=timings,
        failures=failures,
        memory=_memory(case, reference, sets[0], variants),
        clocks=_clocks_under_load(ours, timings[OURS].seconds.median),
    )
    del reference, sets, variants, ours
    _release()
    return result


def run_executor(case: ExecutorCase, options: Options, device: torch.device) -> ExecutorResult:
    """Verify programs of several lengths and, on a GPU, time those that pass side by side."""
    results = []
    for program in case.programs:
        progress(f"  {program.name}")
        results.append(_verified(program, options, device))
    if device.type == "cuda":
        sets = _inputs(case.shape, device)
        variants = [
            _ours(program.name, program.fused(_reference(program, device)), sets, options)
            for program, result in zip(case.programs, results, strict=True)
            if result.passed
        ]
        timings = _time_ours(variants, options)
        results = [
            replace(result, timings={OURS: timings[result.name]})
            if result.name in timings
            else result
            for result in results
        ]
        del variants, sets
        _release()
    return ExecutorResult(case.name, results)


def _time_ours(variants: list[Variant], options: Options) -> dict[str, Timing]:
    for variant in variants:
        timing.warm_up(variant)
    # Differences of a percent are of interest, so there are twice as many turns.
    settings = replace(options.settings, rounds=2 * options.settings.rounds)
    return timing.interleave(variants, settings, timing.sample_cuda)


def _verified(case: Case, options: Options, device: torch.device) -> CaseResult:
    checks: list[Check] = []
    for data in (AS_BUILT, *DISTRIBUTIONS):
        progress(f"  verifying on {data}")
        with flags.quiet_fallback(device.type == "cpu"):
            checks += _verify(case, data, options, device)
    reference = _reference(case, device)
    x = _inputs(case.shape, device, count=1)[0]
    with _at_tier(options, device), torch.no_grad():
        explanation = explain(case.fused(reference), *x)
    work = _work(case, reference)
    seconds, kind = work.floor(options.tier)
    return CaseResult(
        name=case.name,
        chain=case.chain,
        shape=(case.shape.m, case.shape.k, case.shape.n),
        training=case.training,
        checks=checks,
        fused=explanation.path == "fused",
        ran=str(explanation),
        bytes=work.bytes,
        flop=work.flop,
        floor_s=seconds,
        floor_kind=kind,
    )


def _verify(case: Case, data: str, options: Options, device: torch.device) -> list[Check]:
    generator = torch.Generator(device).manual_seed(SEED)
    reference = _reference(case, device)
    distribution = "rand"
    if data in DISTRIBUTIONS:
        distribution = data
        draw_weights(reference, distribution, generator)
    like = torch.empty(0, device=device)
    x = draw(distribution, (case.shape.m, case.shape.k), like, generator)
    candidates = {"": case.fused(reference)}
    if case.can_freeze and device.type == "cuda":
        frozen = case.fused(reference)
        freeze(frozen)
        candidates["frozen, "] = frozen
    checks: list[Check] = []
    for prefix, candidate in candidates.items():
        with _at_tier(options, device):
            checks += compare_models(
                reference,
                candidate,
                [x],
                label=f"{prefix}{data}",
                training=case.training,
                seed=SEED,
            )
    return checks


def _reference(case: Case, device: torch.device) -> nn.Module:
    """The chain with initial parameters; running statistics differ from their initial values."""
    torch.manual_seed(SEED)
    with device:
        reference = case.reference(case.shape)
    for module in reference.modules():
        if isinstance(module, nn.BatchNorm1d) and module.running_var is not None:
            assert module.running_mean is not None
            module.running_mean.normal_(0.0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return reference.train(case.training)


def _inputs(shape: Shape, device: torch.device, count: int | None = None) -> list[tuple[Tensor]]:
    if count is None:
        count = timing.sets_needed(4 * shape.m * shape.k)
    torch.manual_seed(SEED)
    return [(torch.rand(shape.m, shape.k, device=device),) for _ in range(count)]


def _work(case: Case, reference: nn.Module) -> Work:
    parameters = sum(4 * p.numel() for p in reference.parameters())
    return linear_work(case.shape.m, case.shape.k, case.shape.n, parameters)


def _ours(name: str, module: nn.Module, sets: Sequence[tuple[Tensor]], options: Options) -> Variant:
    device = sets[0][0].device
    return Variant(name, timing.rotating(module, sets), lambda: _at_tier(options, device))


def _at_tier(options: Options, device: torch.device) -> AbstractContextManager[object]:
    """The tier that is measured; on the CPU there is none, and torch's own arithmetic runs."""
    return precision(options.tier) if device.type == "cuda" else nullcontext()


def _variants(
    case: Case, reference: nn.Module, sets: Sequence[tuple[Tensor]], options: Options
) -> tuple[list[Variant], set[str]]:
    """All variants, and the names of those that compile at their first call."""

    def torch_variant(name: str, function: Callable[..., Any]) -> Variant:
        return Variant(name, timing.rotating(function, sets))

    variants = [torch_variant(EAGER, reference)]
    variants.append(Variant(EAGER_TF32, timing.rotating(reference, sets), flags.tf32))
    if options.compile:
        torch.compiler.reset()
        tuned = torch.compile(reference, mode="max-autotune-no-cudagraphs")
        variants.append(torch_variant(COMPILE, torch.compile(reference)))
        variants.append(torch_variant(COMPILE_TUNED, tuned))
    variants.append(_ours(OURS, case.fused(reference), sets, options))
    if case.can_freeze:
        frozen = case.fused(reference)
        freeze(frozen)
        variants.append(_ours(FROZEN, frozen, sets, options))
    return variants, {COMPILE, COMPILE_TUNED}


def _warm_up(variants: Sequence[Variant], compiling: set[str]) -> dict[str, str]:
    """Warm every variant up; a compile that fails is reported, anything else is raised."""
    failures = {}
    for variant in variants:
        progress(f"  warming up {variant.name}")
        try:
            timing.warm_up(variant)
        except Exception as error:
            if variant.name not in compiling:
                raise
            failures[variant.name] = describe(error)
            progress(f"  {variant.name} failed: {failures[variant.name]}")
    return failures


def _memory(
    case: Case, reference: nn.Module, inputs: tuple[Tensor], variants: Sequence[Variant]
) -> Memory:
    tensors = [*reference.parameters(), *reference.buffers(), *inputs]
    calls = {variant.name: variant for variant in variants}
    return Memory(
        resident=sum(t.numel() * t.element_size() for t in tensors),
        eager=_peak(calls[EAGER]),
        ours=_peak(calls[OURS]),
        planes=planes_bytes(case.shape),
    )


def planes_bytes(shape: Shape) -> int:
    """Bytes of the fp16 planes of x and of weight; 0 where the library is not there."""
    binding = native().binding
    if binding is None:
        return 0
    return sum(sum(binding.planes_layout(rows, shape.k)[1:]) for rows in (shape.m, shape.n))


def _peak(variant: Variant) -> int:
    """Most bytes that one call holds on top of what was there before it, its result included."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad(), variant.context():
        result = variant.call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def _clocks_under_load(
    variant: Variant, seconds: float, slice_s: float = 0.02
) -> dict[str, float] | None:
    """Clocks while the variant runs back to back, until nvidia-smi has answered."""
    calls = max(1, round(slice_s / seconds))
    with (
        ThreadPoolExecutor(1) as pool,
        torch.no_grad(),
        variant.context(),
    ):
        answer = pool.submit(environment.clocks)
        while not answer.done():
            for _ in range(calls):
                variant.call()
            torch.cuda.synchronize()
        return answer.result()


def _release() -> None:
    gc.collect()
    torch.cuda.empty_cache()
