"""Tables of results: text cells only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pycutfuse.bench.results import (
    COMPILE,
    COMPILE_TUNED,
    COMPILED,
    EAGER,
    EAGER_TF32,
    FROZEN,
    NO_SLOWER,
    OURS,
    CaseResult,
    ExecutorResult,
    HostOverhead,
    SizesResult,
)
from pycutfuse.bench.tiers import TIERS

NOTHING = "-"

SIZES = {
    "sizes": ("Random (M, N, K), log-uniform", "Linear, gelu"),
    "conv_sizes": ("Random convolutions, NCHW", "Conv2d"),
    "conv_breadth": (
        "Random convolutions of every kind, a third of them transposed, NCHW",
        "Conv2d, ConvTranspose2d",
    ),
    "resnet50": ("Convolutions of ResNet-50, 64 images, NCHW", "Conv2d, BatchNorm2d (eval), relu"),
    "resnet50_channels_last": (
        "Convolutions of ResNet-50, 64 images, channels_last",
        "Conv2d, BatchNorm2d (eval), relu",
    ),
}
"""Title and chain of each case of sizes, by name."""


@dataclass(frozen=True)
class Table:
    """A heading, column names and rows of text; the first column is aligned left."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def text(self) -> str:
        """Aligned with spaces."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        rule = ["-" * width for width in widths]
        aligned = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in (self.columns, rule, *self.rows)
        ]
        return "\n".join([self.title, *aligned])

    def markdown(self) -> str:
        """A GitHub table."""
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        rows = [f"| {' | '.join(cells)} |" for cells in (self.columns, rule, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *rows])


def milliseconds(seconds: float | None) -> str:
    """Four significant digits of a time in ms.

    Examples
    --------
    >>> milliseconds(0.0109712), milliseconds(0.0000421)
    ('10.97', '0.0421')
    """
    if seconds is None:
        return NOTHING
    value = seconds * 1e3
    digits = 3 - math.floor(math.log10(value)) if value > 0 else 3
    return f"{value:.{min(max(digits, 0), 4)}f}"


def factor(value: float | None) -> str:
    """A ratio.

    Examples
    --------
    >>> factor(3.9044)
    '3.90x'
    """
    return NOTHING if value is None else f"{value:.2f}x"


def tier_title(tier: str) -> str:
    """Tier and what it means."""
    return f"{tier}: {TIERS[tier].setting}"


def times(tier: str, cases: Sequence[CaseResult], *, judged: bool = False) -> Table:
    """Medians at one tier, ratios to PyTorch; if `judged` also share of the floor and errors."""
    torch = [EAGER, *([EAGER_TF32] if tier == "ieee" else []), COMPILE, COMPILE_TUNED]
    columns = ["case", *torch, OURS, "p20-p80", FROZEN, "ratio", "ratio frozen"]
    # For TF32 the compiled chain is what people compare with, so it has columns of its own.
    if tier == "tf32":
        columns += ["to compile", "to compile frozen"]
    if judged:
        columns += ["of floor", "of floor frozen", "error", "PyTorch's"]
    rows = []
    for case in cases:
        row = [case.name, *(milliseconds(case.seconds(name)) for name in torch)]
        row += [_own(case), _spread(case), milliseconds(case.seconds(FROZEN))]
        row += [factor(case.speedup(OURS)), factor(case.speedup(FROZEN))]
        if tier == "tf32":
            row += [factor(case.speedup(name, COMPILED)) for name in (OURS, FROZEN)]
        if judged:
            row += [_share(case, OURS), _share(case, FROZEN), *_errors(case)]
        rows.append(row)
    title = f"{tier_title(tier)}; medians in ms, ratios to the fastest of eager and compile"
    if judged:
        title += "; relative Frobenius error of the worst check against float64"
    return Table(title, columns, rows)


def rates(tier: str, cases: Sequence[CaseResult]) -> Table:
    """Rates, floor, memory and clocks at one tier."""
    columns = ["case", "GB/s", "TFLOP/s", "floor", "of floor", "of floor frozen"]
    columns += ["peak MB eager", "peak MB", "planes MB", "peak allowed", "SM MHz", "timed"]
    rows = []
    for case in cases:
        row = [case.name, _rate(case, case.bytes, 1e9), _rate(case, case.flop, 1e12)]
        row.append(f"{milliseconds(case.floor_s)} {case.floor_kind}")
        row += [_share(case, OURS), _share(case, FROZEN)]
        memory = case.memory
        if memory is None:
            row += [NOTHING] * 4
        else:
            row += [_megabytes(memory.resident + memory.eager)]
            row += [_megabytes(memory.resident + memory.ours), _megabytes(memory.planes)]
            row += ["kept" if memory.kept else "EXCEEDED"]
        row.append(
            f"{case.clocks['sm_mhz']:.0f}" if case.clocks and "sm_mhz" in case.clocks else NOTHING
        )
        row.append(case.timings[OURS].regime if OURS in case.timings else NOTHING)
        rows.append(row)
    title = f"{tier}: rates of pycutfuse, floor in ms, peak memory of one call"
    return Table(title, columns, rows)


def accuracy(title: str, cases: Sequence[CaseResult]) -> Table:
    """Errors of the worst check of each case."""
    columns = ["case", "shape", "checks", "error", "PyTorch's", "worst of allowed", "verified"]
    rows = []
    for case in cases:
        row = [case.name, case.shape, str(len(case.checks)), *_errors(case)]
        rows.append([*row, f"{case.error_ratio:.2f}", "passed" if case.passed else "FAILED"])
    return Table(f"{title} (relative Frobenius error of the worst check)", columns, rows)


def sizes(results: Sequence[SizesResult]) -> Table:
    """One row for each tier of one case; without ratios where nothing was timed."""
    timed = any(result.ratios() for result in results)
    title, chain = SIZES.get(results[0].name, (results[0].name, ""))
    columns = [chain, "sizes", "verified"]
    if timed:
        compiled = any(result.ratios(COMPILE) for result in results)
        slowest = "slowest to the faster of eager and compile" if compiled else "slowest to eager"
        columns += ["taken", slowest, f"below {NO_SLOWER}x", "mean", "mean of taken"]
        columns += ["mean, floor above 20 µs", "slowest to max-autotune"]
    rows = []
    for result in results:
        row = [result.tier, str(len(result.entries))]
        row.append(str(sum(entry.passed for entry in result.entries)))
        rows.append(row + (_ratios(result) if timed else []))
    return Table(f"{title}: GPU time by graph replay" if timed else title, columns, rows)


def _ratios(result: SizesResult) -> list[str]:
    ratios, compiled = result.ratios(), result.ratios(COMPILE_TUNED)
    mean = f"{factor(result.mean)} of {len(result.comparable)}"
    slowest = f"{factor(min(compiled, default=None))} of {len(compiled)}"
    return [
        f"{result.taken} ({result.share_taken:.0%})",
        factor(min(ratios, default=None)),
        str(len(result.losers)) if ratios else NOTHING,
        factor(result.mean_of_all),
        factor(result.mean_of_taken),
        mean if result.mean is not None else NOTHING,
        slowest if compiled else NOTHING,
    ]


def forced(results: Sequence[CaseResult]) -> Table:
    """One row for each forced policy."""
    columns = ["sm_80 policy forced on this GPU", EAGER, OURS, "ratio", "error", "PyTorch's"]
    rows = []
    for case in results:
        row = [case.name, milliseconds(case.seconds(EAGER)), _own(case)]
        rows.append([*row, factor(case.speedup(OURS)), *_errors(case)])
    return Table(f"{tier_title('ieee')}; Linear, medians in ms", columns, rows)


def executor(results: Sequence[ExecutorResult]) -> Table:
    """What programs cost."""
    results = [r for r in results if any(program.timings for program in r.programs)]
    steps = [program.name.split(".")[1] for program in results[0].programs]
    columns = ["program cost over bias alone", "bias, ms"]
    columns += [f"{count} step{'s' if count != '1' else ''}" for count in steps[1:]]
    rows = []
    for result in results:
        row = [result.name, milliseconds(result.programs[0].seconds(OURS))]
        for program in result.programs[1:]:
            cost = result.cost(program)
            row.append(NOTHING if cost is None else f"{cost:+.1%}")
        rows.append(row)
    return Table("What an interpreted program costs (bias counted as a step)", columns, rows)


def host(results: Sequence[HostOverhead]) -> Table:
    """Host time of an eager call of each module."""
    columns = ["module", "by", "no_grad", "grad", "over a launch", "over a launch, grad"]
    rows = []
    for found in results:
        for name, plain, grad in (
            (OURS, found.ours_no_grad, found.ours_grad),
            (EAGER, found.eager_no_grad, found.eager_grad),
        ):
            times = (plain, grad, plain - found.empty_launch, grad - found.empty_launch)
            rows.append([found.module, name, *(f"{seconds * 1e6:.1f}" for seconds in times)])
    launch = f"{results[0].empty_launch * 1e6:.1f}"
    return Table(f"Host time of an eager call in µs (an empty launch: {launch})", columns, rows)


def _own(case: CaseResult) -> str:
    """Our time, or in words that it was not ours to time."""
    return case.path if case.path and not case.fused else milliseconds(case.seconds(OURS))


def _errors(case: CaseResult) -> list[str]:
    if not case.checks:
        return [NOTHING, NOTHING]
    worst = max(case.checks, key=lambda check: check.ratio)
    return [f"{worst.ours.frobenius:.1e}", f"{worst.torch.frobenius:.1e}"]


def _spread(case: CaseResult) -> str:
    timing = case.timings.get(OURS)
    if timing is None:
        return NOTHING
    return f"{milliseconds(timing.seconds.p20)}-{milliseconds(timing.seconds.p80)}"


def _rate(case: CaseResult, amount: int, unit: float) -> str:
    seconds = case.seconds(OURS)
    return NOTHING if seconds is None else f"{amount / seconds / unit:.0f}"


def _share(case: CaseResult, variant: str) -> str:
    seconds = case.seconds(variant)
    return NOTHING if seconds is None else f"{case.floor_s / seconds:.0%}"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.0f}"
