"""The report of a run: plain text for the terminal, Markdown for README."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pycutfuse.bench import tables as make
from pycutfuse.bench.results import COMPILE_TUNED, NO_SLOWER, CaseResult, Fuzz, Run, SizesResult
from pycutfuse.bench.tables import Table, factor
from pycutfuse.bench.tiers import TIERS

BEGIN = "<!-- results:begin -->"
END = "<!-- results:end -->"


def markers(section: str | None) -> tuple[str, str]:
    """Between which the tables stand, of the whole document or of one of its sections."""
    if section is None:
        return BEGIN, END
    return BEGIN.replace(" -->", f" {section} -->"), END.replace(" -->", f" {section} -->")


def by_tier(run: Run) -> dict[str, list[CaseResult]]:
    """Cases of each tier that has any, tiers in their order."""
    found = {tier: [case for case in run.cases if case.tier == tier] for tier in TIERS}
    return {tier: cases for tier, cases in found.items() if cases}


def tables(run: Run) -> list[Table]:
    """The tables that say something about this run, for the terminal."""
    found: list[Table] = []
    for tier, cases in by_tier(run).items():
        if _speaks(run, cases):
            found.append(make.times(tier, cases))
            found.append(make.rates(tier, cases))
        found.append(make.accuracy(f"{tier}: accuracy against float64", cases))
    found += _summaries(run)
    if run.executor:
        programs = [program for result in run.executor for program in result.programs]
        found.append(make.accuracy("Accuracy of programs against float64", programs))
    return found


def readme_tables(run: Run) -> list[Table]:
    """The tables for README: one for each tier, and the summaries."""
    found = [
        make.times(tier, cases, judged=True)
        if _speaks(run, cases)
        else make.accuracy(f"{tier}: accuracy against float64", cases)
        for tier, cases in by_tier(run).items()
    ]
    return found + _summaries(run)


def _speaks(run: Run, cases: list[CaseResult]) -> bool:
    """Whether a table of times says anything: a time, or that PyTorch ran for us on a GPU."""
    return any(case.timings or (run.on_gpu and not case.fused) for case in cases)


def _summaries(run: Run) -> list[Table]:
    found: list[Table] = []
    order = list(TIERS)
    for name in dict.fromkeys(sizes.name for sizes in run.sizes):
        same = [sizes for sizes in run.sizes if sizes.name == name]
        found.append(make.sizes(sorted(same, key=lambda sizes: order.index(sizes.tier))))
    if run.forced:
        found.append(make.forced(run.forced))
    if any(program.timings for result in run.executor for program in result.programs):
        found.append(make.executor(run.executor))
    if run.host:
        found.append(make.host(run.host))
    return found


def text(run: Run) -> str:
    """The whole report for the terminal."""
    parts = [heading(run), *(table.text() for table in tables(run)), *notes(run), verdict(run)]
    return "\n\n".join(parts)


def markdown(run: Run) -> str:
    """The report for README."""
    parts = [heading(run), *(table.markdown() for table in readme_tables(run))]
    return "\n\n".join([*parts, *("\n".join(f"- {line}" for line in lines(run)),)]).rstrip()


def heading(run: Run) -> str:
    """Where and with what the run was made."""
    e = run.environment
    versions = f"torch {e['torch']}, Python {e['python']}, pycutfuse {e['pycutfuse']}"
    if e.get("commit"):
        versions += f" ({e['commit']})"
    if not run.on_gpu:
        return f"No GPU: reference path at reduced sizes, verified and not timed; {versions}."
    return f"{e['gpu']}, driver {e['driver']}, CUDA {e['cuda']}, {versions}; no_grad."


def notes(run: Run) -> list[str]:
    """`lines` as one part of the report, or nothing."""
    found = lines(run)
    return ["\n".join(found)] if found else []


def lines(run: Run) -> list[str]:
    """What tables do not hold: failures, what PyTorch ran for us, losers, the fuzzer's counts."""
    results = [*run.cases, *(program for result in run.executor for program in result.programs)]
    results += run.forced
    found = [line for result in results for line in _case_lines(run, result)]
    found += [line for sizes in run.sizes for line in _sizes_lines(run, sizes)]
    found += [f"{name}: skipped: {why}" for name, why in run.skipped.items()]
    return found + fuzz_lines(run.fuzz)


def _case_lines(run: Run, result: CaseResult) -> list[str]:
    name = f"{result.name} ({result.tier})"
    found = [f"{name}: {variant} failed: {why}" for variant, why in result.failures.items()]
    found += [
        f"FAILED {check.what} of {name}: {check.ratio:.2f} of the allowed error"
        for check in result.checks
        if not check.passed
    ]
    if run.on_gpu and result.ran and not result.fused:
        found.append(f"{name}: not timed, PyTorch ran for us: {result.ran.splitlines()[0]}")
    memory = result.memory
    if memory is not None and not memory.kept:
        own, allowed = memory.resident + memory.ours, memory.allowed
        found.append(f"{name}: peak of {own / 1e6:.0f} MB EXCEEDED {allowed / 1e6:.0f} MB")
    return found


def _sizes_lines(run: Run, sizes: SizesResult) -> list[str]:
    name = f"{sizes.name} ({sizes.tier})"
    found = [
        f"{name}: {entry} below eager: {factor(entry.ratio())} "
        f"(at first {factor(entry.first_ratio)}), {entry.path}"
        for entry in sizes.losers
    ]
    found += [
        f"{name}: {entry} to compile max-autotune: {factor(ratio)}, {entry.path}"
        for entry in sizes.entries
        if (ratio := entry.ratio(COMPILE_TUNED)) is not None and ratio < 0.9
    ]
    again = sum(entry.first_ratio is not None for entry in sizes.entries)
    if again:
        found.append(f"{name}: {again} below {NO_SLOWER}x at first, timed again")
    if run.on_gpu:
        found += [f"{name}: {line}" for line in _reason_lines(sizes.reasons())]
    for entry in sizes.entries:
        if entry.failure:
            found.append(f"FAILED {name}: {entry}: {entry.failure}")
        elif not entry.passed:
            ratio = max((check.ratio for check in entry.checks), default=0.0)
            found.append(f"FAILED {name}: {entry}: {ratio:.2f} of the allowed error")
    return found


def _reason_lines(reasons: dict[str, int]) -> list[str]:
    """Counts of reasons, those that differ in their numbers together: one as an example."""
    alike: dict[str, list[tuple[str, int]]] = {}
    for why, count in reasons.items():
        alike.setdefault(re.sub(r"[\d.x]*\d[\d.x]*", "#", why), []).append((why, count))
    found = []
    for group in alike.values():
        why, count = group[0]
        example = "" if len(group) == 1 else ", and others alike"
        found.append(f"{sum(count for _, count in group)} {why}{example}")
    return found


def fuzz_lines(runs: Sequence[Fuzz]) -> list[str]:
    """Counts of every run; of those whose seeds follow each other, together."""
    joined: list[Fuzz] = []
    for fuzz in sorted(runs, key=lambda one: (one.family, one.device, one.seeds)):
        last = joined[-1] if joined else None
        if last is not None and (last.family, last.device, last.seeds[1] + 1) == (
            fuzz.family,
            fuzz.device,
            fuzz.seeds[0],
        ):
            joined[-1] = replace(
                last,
                seeds=(last.seeds[0], fuzz.seeds[1]),
                counts=_added(last.counts, fuzz.counts),
                handovers=last.handovers + fuzz.handovers,
                fallbacks=last.fallbacks + fuzz.fallbacks,
                mechanisms=_added(last.mechanisms, fuzz.mechanisms),
            )
        else:
            joined.append(fuzz)
    return [fuzz_line(fuzz) for fuzz in joined]


def _added(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    names = [*first, *(name for name in second if name not in first)]
    return {name: first.get(name, 0) + second.get(name, 0) for name in names}


def fuzz_line(fuzz: Fuzz) -> str:
    """One line of counts."""
    counts = ", ".join(f"{count} {name}" for name, count in fuzz.counts.items())
    ran = ", ".join(f"{count} by {name}" for name, count in fuzz.mechanisms.items())
    return (
        f"Fuzzed {fuzz.family}, seeds {fuzz.seeds[0]} to {fuzz.seeds[1]} on {fuzz.device}: "
        f"{fuzz.total} configurations, {counts}; {fuzz.handovers} hand-overs, "
        f"{fuzz.fallbacks} fallbacks" + (f"; {ran}" if ran else "")
    )


def verdict(run: Run) -> str:
    """One line: how many cases passed, and what was not done."""
    if run.failed:
        return f"FAILED: {', '.join(run.failed)}"
    if run.count == 0:
        return "NOTHING VERIFIED"
    if not run.on_gpu:
        return (
            f"PASSED: {run.count} cases verified on the CPU. This machine has no GPU: the "
            "reference path ran at reduced sizes and no speed is reported."
        )
    left = sum(not case.fused for case in run.cases)
    untimed = f"; {left} of them not timed, as PyTorch ran for us" if left else ""
    return f"PASSED: {run.count} cases verified{untimed}"


def update_region(document: str, content: str, section: str | None = None) -> str:
    """Replace what stands between the results markers of a document, or of a section of it.

    Raises
    ------
    ValueError
        If the document does not hold each marker once, in order.
    """
    begin, end = markers(section)
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ValueError(f"the document must hold {begin} and {end} once each")
    line_end = "\r\n" if "\r\n" in document else "\n"
    before, rest = document.split(begin)
    if end not in rest:
        raise ValueError(f"{end} stands before {begin}")
    after = rest.split(end)[1]
    lines = [f"{before}{begin}", *content.strip().split("\n"), f"{end}{after}"]
    return line_end.join(lines)


def update_readme(path: str | Path, run: Run, section: str | None = None) -> bool:
    """Write the tables of `run` between the markers of a file; False if they were there already.

    Raises
    ------
    ValueError, OSError
        If the file has no such markers or cannot be read and written.
    """
    path = Path(path)
    old = path.read_bytes().decode()
    new = update_region(old, markdown(run), section)
    if new != old:
        path.write_bytes(new.encode())
    return new != old
