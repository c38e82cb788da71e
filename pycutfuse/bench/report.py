"""Tables of a run: plain text for the terminal, Markdown for README."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pycutfuse.bench.results import (
    COMPILE,
    COMPILE_TUNED,
    EAGER,
    EAGER_TF32,
    FROZEN,
    OURS,
    CaseResult,
    ExecutorResult,
    HostOverhead,
    Run,
)

BEGIN = "<!-- results:begin -->"
END = "<!-- results:end -->"
NOTHING = "-"


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


def tables(run: Run) -> list[Table]:
    """The tables that say something about this run."""
    found: list[Table] = []
    if any(case.timings for case in run.cases):
        found.append(_times(run.cases))
        found.append(_rates(run.cases))
    if run.cases:
        found.append(_accuracy("Accuracy against float64", run.cases))
    if any(program.timings for result in run.executor for program in result.programs):
        found.append(_executor(run.executor))
    if run.executor:
        programs = [program for result in run.executor for program in result.programs]
        found.append(_accuracy("Accuracy of programs against float64", programs))
    if run.host is not None:
        found.append(_host(run.host))
    return found


def text(run: Run) -> str:
    """The whole report for the terminal."""
    parts = [heading(run), *(table.text() for table in tables(run)), *notes(run), verdict(run)]
    return "\n\n".join(parts)


def markdown(run: Run) -> str:
    """The report for README."""
    return "\n\n".join([heading(run), *(table.markdown() for table in tables(run)), *notes(run)])


def heading(run: Run) -> str:
    """Where and with what the run was made."""
    e = run.environment
    versions = f"torch {e['torch']}, Python {e['python']}, pycutfuse {e['pycutfuse']}"
    if e.get("commit"):
        versions += f" ({e['commit']})"
    if not run.on_gpu:
        return f"No GPU: reference path at reduced sizes, verified and not timed; {versions}."
    return (
        f"{e['gpu']}, driver {e['driver']}, CUDA {e['cuda']}, {versions}; tier {run.tier}, fp32 "
        f"tensors, no_grad, PyTorch flags matmul={e['fp32_precision']['matmul']}."
    )


def notes(run: Run) -> list[str]:
    """What went wrong: variants that failed, failed checks, cases that PyTorch ran for us."""
    results = [*run.cases, *(program for result in run.executor for program in result.programs)]
    lines = [
        f"{result.name}: {name} failed: {reason}"
        for result in results
        for name, reason in result.failures.items()
    ]
    lines += [
        f"FAILED {check.what} of {result.name}: {check.ratio:.2f} of the allowed error"
        for result in results
        for check in result.checks
        if not check.passed
    ]
    if run.on_gpu:
        lines += [
            f"{result.name}: no fused kernel ran: {result.ran.splitlines()[0]}"
            for result in results
            if result.ran and not result.fused
        ]
    return ["\n".join(lines)] if lines else []


def verdict(run: Run) -> str:
    """One line: how many cases passed, and what was not done."""
    failed = [result.name for result in run.results if not result.passed]
    if failed:
        return f"FAILED: {len(failed)} of {len(run.results)} cases: {', '.join(failed)}"
    if not run.on_gpu:
        return (
            f"PASSED: {len(run.results)} cases verified on the CPU. This machine has no GPU: the "
            "reference path ran at reduced sizes and no speed is reported."
        )
    return f"PASSED: {len(run.results)} cases verified and timed"


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


def _times(cases: Sequence[CaseResult]) -> Table:
    columns = ["case", EAGER, EAGER_TF32, COMPILE, COMPILE_TUNED, OURS, "p20-p80", FROZEN]
    rows = []
    for case in cases:
        row = [case.name]
        row += [milliseconds(case.seconds(name)) for name in columns[1:6]]
        row += [_spread(case), milliseconds(case.seconds(FROZEN))]
        row += [_factor(case.speedup(OURS)), _factor(case.speedup(FROZEN))]
        rows.append(row)
    title = "Medians in ms; ratios to the fastest of eager, compile and compile max-autotune"
    return Table(title, [*columns, "ratio", "ratio frozen"], rows)


def _rates(cases: Sequence[CaseResult]) -> Table:
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
            row += ["kept" if memory.resident + memory.ours <= memory.allowed else "EXCEEDED"]
        row.append(
            f"{case.clocks['sm_mhz']:.0f}" if case.clocks and "sm_mhz" in case.clocks else NOTHING
        )
        row.append(case.timings[OURS].regime if OURS in case.timings else NOTHING)
        rows.append(row)
    title = "Rates of pycutfuse, floor in ms (PERFORMANCE.md), peak memory of one call"
    return Table(title, columns, rows)


def _accuracy(title: str, cases: Sequence[CaseResult]) -> Table:
    columns = ["case", "MxK->N", "checks", "error", "PyTorch's", "worst of allowed", "verified"]
    rows = []
    for case in cases:
        m, k, n = case.shape
        row = [case.name, f"{m}x{k}->{n}", str(len(case.checks))]
        if case.checks:
            worst = max(case.checks, key=lambda check: check.ratio)
            row += [f"{worst.ours.frobenius:.1e}", f"{worst.torch.frobenius:.1e}"]
        else:
            row += [NOTHING, NOTHING]
        rows.append([*row, f"{case.error_ratio:.2f}", "passed" if case.passed else "FAILED"])
    return Table(f"{title} (relative Frobenius error of the worst check)", columns, rows)


def _executor(results: Sequence[ExecutorResult]) -> Table:
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


def _host(host: HostOverhead) -> Table:
    def row(name: str, plain: float, grad: float) -> list[str]:
        over = [
            f"{(plain - host.empty_launch) * 1e6:.1f}",
            f"{(grad - host.empty_launch) * 1e6:.1f}",
        ]
        return [name, f"{plain * 1e6:.1f}", f"{grad * 1e6:.1f}", *over]

    columns = ["Linear with bias", "no_grad", "grad", "over a launch", "over a launch, grad"]
    rows = [row(OURS, host.ours_no_grad, host.ours_grad)]
    rows.append(row(EAGER, host.eager_no_grad, host.eager_grad))
    launch = f"{host.empty_launch * 1e6:.1f}"
    return Table(f"Host time of an eager call in µs (an empty launch: {launch})", columns, rows)


def _spread(case: CaseResult) -> str:
    timing = case.timings.get(OURS)
    if timing is None:
        return NOTHING
    return f"{milliseconds(timing.seconds.p20)}-{milliseconds(timing.seconds.p80)}"


def _factor(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}x"


def _rate(case: CaseResult, amount: int, unit: float) -> str:
    seconds = case.seconds(OURS)
    return NOTHING if seconds is None else f"{amount / seconds / unit:.0f}"


def _share(case: CaseResult, variant: str) -> str:
    seconds = case.seconds(variant)
    return NOTHING if seconds is None else f"{case.floor_s / seconds:.0%}"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.0f}"


def update_region(document: str, content: str) -> str:
    """Replace what stands between the results markers of a document.

    Raises
    ------
    ValueError
        If the document does not hold each marker once, in order.
    """
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"the document must hold {BEGIN} and {END} once each")
    before, rest = document.split(BEGIN)
    if END not in rest:
        raise ValueError(f"{END} stands before {BEGIN}")
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{content.strip()}\n{END}{after}"


def update_readme(path: str | Path, run: Run) -> bool:
    """Write the tables of `run` between the markers of a file; False if they were there already.

    Raises
    ------
    ValueError, OSError
        If the file has no such markers or cannot be read and written.
    """
    path = Path(path)
    old = path.read_text(encoding="utf-8")
    new = update_region(old, markdown(run))
    if new != old:
        path.write_text(new, encoding="utf-8")
    return new != old
