"""Runs cases: verify each, and time it only if it passes and our kernels ran."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pycutfuse._console import progress
from pycutfuse.bench import flags, route, timing, usage
from pycutfuse.bench.accuracy import Check
from pycutfuse.bench.case import AnyShape, Case, ExecutorCase
from pycutfuse.bench.compare import DISTRIBUTIONS, compare_models, draw, draw_weights
from pycutfuse.bench.floors import planes_bytes
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
from pycutfuse.bench.tiers import TIERS, Tier
from pycutfuse.bench.timing import Settings, Timing, Variant
from pycutfuse.freezing import freeze

AS_BUILT = "rand, initial weights"
SEED = 0
TUNED = "max-autotune-no-cudagraphs"


@dataclass(frozen=True)
class Options:
    """What the user chose.

    Attributes
    ----------
    tier : str
        Name of the tier that is measured.
    compile : bool
        Also time torch.compile, which takes seconds for each case.
    tuned : bool
        With `compile`: also max-autotune, which takes up to a minute for each case.
    settings : Settings
        Slices and rounds of timing.
    """

    tier: str = "ieee"
    compile: bool = True
    tuned: bool = True
    settings: Settings = field(default_factory=Settings)

    @property
    def at(self) -> Tier:
        """The tier itself."""
        return TIERS[self.tier]


def run_case(case: Case, options: Options, device: torch.device) -> CaseResult:
    """Verify a case and, on a GPU and if every check passes on our kernels, time it."""
    progress(f"  {case.chain}, {case.shape}")
    with flags.fp32_precision(options.at.tf32):
        result = verified(case, options, device)
        if device.type != "cuda" or not result.passed:
            return result
        if not result.fused:
            progress(f"  not timed: {result.ran.splitlines()[0]}")
            return result
        return _timed(case, result, options, device)


def _timed(case: Case, result: CaseResult, options: Options, device: torch.device) -> CaseResult:
    reference = make_reference(case, options.at, device)
    sets = make_inputs(case.shape, options.at, device)
    variants = _variants(case, reference, sets, options)
    failures = _warm_up(variants)
    frozen = _frozen(case, reference, sets)
    if isinstance(frozen, Variant):
        variants.append(frozen)
    elif frozen:
        failures[FROZEN] = frozen
    variants = [variant for variant in variants if variant.name not in failures]
    progress(f"  timing {', '.join(variant.name for variant in variants)}")
    timings = timing.interleave(variants, options.settings, timing.sample_cuda)
    calls = {variant.name: variant for variant in variants}
    held = [*reference.parameters(), *reference.buffers(), *sets[0]]
    result = replace(
        result,
        timings=timings,
        failures=failures,
        memory=Memory(
            resident=usage.tensor_bytes(held),
            eager=usage.peak_bytes(calls[EAGER]),
            ours=usage.peak_bytes(calls[OURS]),
            planes=planes_bytes(case.shape.contractions, options.at.planes),
            slack=case.memory_slack,
        ),
        clocks=usage.clocks_under_load(calls[OURS], timings[OURS].seconds.median),
    )
    del reference, sets, variants, calls, frozen, held
    usage.release()
    return result


def run_executor(case: ExecutorCase, options: Options, device: torch.device) -> ExecutorResult:
    """Verify programs of several lengths and, on a GPU, time those that pass side by side."""
    with flags.fp32_precision(options.at.tf32):
        results = []
        for program in case.programs:
            progress(f"  {program.name}")
            results.append(verified(program, options, device))
        if device.type == "cuda":
            results = _time_programs(case, results, options, device)
        return ExecutorResult(case.name, results)


def _time_programs(
    case: ExecutorCase, results: list[CaseResult], options: Options, device: torch.device
) -> list[CaseResult]:
    sets = make_inputs(case.shape, options.at, device)
    variants = []
    for program, result in zip(case.programs, results, strict=True):
        if result.passed and result.fused:
            module = program.fused(make_reference(program, options.at, device))
            variants.append(Variant(program.name, timing.rotating(module, sets)))
    timings: dict[str, Timing] = {}
    for variant in variants:
        timing.warm_up(variant)
    if variants:
        # Differences of a percent are of interest, so there are twice as many turns.
        settings = replace(options.settings, rounds=2 * options.settings.rounds)
        timings = timing.interleave(variants, settings, timing.sample_cuda)
    del variants, sets
    usage.release()
    return [
        replace(result, timings={OURS: timings[result.name]}) if result.name in timings else result
        for result in results
    ]


def verified(
    case: Case,
    options: Options,
    device: torch.device,
    datasets: Sequence[str] = (AS_BUILT, *DISTRIBUTIONS),
) -> CaseResult:
    """Compare a case with float64 on every data set and say which kernel ran. Times nothing."""
    checks: list[Check] = []
    for data in datasets:
        progress(f"  verifying on {data}")
        with flags.quiet_fallback(device.type == "cpu"):
            checks += _verify(case, data, options, device)
    reference = make_reference(case, options.at, device)
    (inputs,) = make_inputs(case.shape, options.at, device, count=1)
    with flags.quiet_fallback(device.type == "cpu"):
        ran = route.observe(case.fused(reference), inputs)
    work = case.work(usage.tensor_bytes(reference.parameters()), options.at.itemsize)
    seconds, kind = work.floor(options.tier)
    return CaseResult(
        name=case.name,
        tier=options.tier,
        chain=case.chain,
        shape=str(case.shape),
        training=case.training,
        checks=checks,
        path=ran.path,
        ran=ran.text,
        bytes=work.bytes,
        flop=work.flop,
        floor_s=seconds,
        floor_kind=kind,
        fp32_precision=flags.in_force(),
    )


def _verify(case: Case, data: str, options: Options, device: torch.device) -> list[Check]:
    generator = torch.Generator(device).manual_seed(SEED)
    reference = make_reference(case, options.at, device)
    distribution = "rand"
    if data in DISTRIBUTIONS:
        distribution = data
        draw_weights(reference, distribution, generator)
    x = draw_input(case.shape, distribution, options.at, generator)
    candidates = {"": case.fused(reference)}
    if case.can_freeze and device.type == "cuda":
        frozen = case.fused(reference)
        freeze(frozen)
        if holds_planes(frozen):
            candidates["frozen, "] = frozen
    checks: list[Check] = []
    # The whole batch in float64, as a chain of convolution and batch norm holds up to 13 results at
    # once: 13 GB for the largest case, counted by a dispatch mode on the CPU.
    for prefix, candidate in candidates.items():
        checks += compare_models(
            reference,
            candidate,
            [x],
            label=f"{prefix}{data}",
            training=case.training,
            seed=SEED,
            limit=options.at.limit,
            cudnn=False,
        )
    return checks


def draw_input(
    shape: AnyShape, distribution: str, tier: Tier, generator: torch.Generator
) -> Tensor:
    """One input of a case, on the device of `generator`."""
    like = torch.empty(0, device=generator.device, dtype=tier.dtype)
    return shape.laid_out(draw(distribution, shape.input_size, like, generator))


def holds_planes(module: nn.Module) -> bool:
    """Whether `pycutfuse.freeze` found something to keep: fp16 and bf16 weights are used as is."""
    return any(getattr(child, "frozen", False) for child in module.modules())


def make_reference(case: Case, tier: Tier, device: torch.device) -> nn.Module:
    """The chain with initial parameters; running statistics differ from their initial values."""
    torch.manual_seed(SEED)
    with device:
        reference = case.reference(case.shape)
    for module in reference.modules():
        if isinstance(module, _BatchNorm) and module.running_var is not None:
            assert module.running_mean is not None
            module.running_mean.normal_(0.0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return reference.to(tier.dtype).train(case.training)


def make_inputs(
    shape: AnyShape, tier: Tier, device: torch.device, count: int | None = None
) -> list[tuple[Tensor]]:
    """Input sets; by default as many as rotating needs."""
    if count is None:
        count = timing.sets_needed(tier.itemsize * math.prod(shape.input_size))
    torch.manual_seed(SEED)

    def make() -> Tensor:
        return shape.laid_out(torch.rand(shape.input_size, device=device, dtype=tier.dtype))

    return [(make(),) for _ in range(count)]


def _variants(
    case: Case, reference: nn.Module, sets: Sequence[tuple[Tensor]], options: Options
) -> list[Variant]:
    """All variants but the frozen one. All run at the tier's flags unless one has its own."""

    def variant(name: str, function: Callable[..., Any]) -> Variant:
        return Variant(name, timing.rotating(function, sets))

    variants = [variant(EAGER, reference)]
    if options.tier == "ieee":
        variants.append(Variant(EAGER_TF32, timing.rotating(reference, sets), flags.tf32))
    if options.compile:
        torch.compiler.reset()
        variants.append(variant(COMPILE, torch.compile(reference)))
        if options.tuned:
            variants.append(variant(COMPILE_TUNED, torch.compile(reference, mode=TUNED)))
    variants.append(variant(OURS, case.fused(reference)))
    return variants


def _frozen(
    case: Case, reference: nn.Module, sets: Sequence[tuple[Tensor]]
) -> Variant | str | None:
    """The frozen variant, warm; or why there is none; None where there is nothing to freeze."""
    if not case.can_freeze:
        return None
    module = case.fused(reference)
    freeze(module)
    if not holds_planes(module):
        return None
    variant = Variant(FROZEN, timing.rotating(module, sets))
    path, reason = route.detours(lambda: timing.warm_up(variant))
    return variant if path == route.FUSED else f"{path} ({reason})"


def _warm_up(variants: Sequence[Variant]) -> dict[str, str]:
    """Warm every variant up; a compile that fails is reported, anything else is raised."""
    failures = {}
    for variant in variants:
        progress(f"  warming up {variant.name}")
        try:
            timing.warm_up(variant)
        except Exception as error:
            if variant.name not in (COMPILE, COMPILE_TUNED):
                raise
            failures[variant.name] = describe(error)
            progress(f"  {variant.name} failed: {failures[variant.name]}")
    return failures
