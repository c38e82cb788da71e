"""``python -m pycutfuse.testing.repro``: one seed in detail, or a range of them in numbers.

Exit codes: 0 nothing is wrong, 1 a seed failed, 2 the command makes no sense, 130 it was
interrupted; counts so far are written.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pycutfuse._console import INTERRUPTED, guarded, number, positive, progress, why_no_file
from pycutfuse.testing.repro import FAILURES, FAMILIES, Outcome, source
from pycutfuse.testing.repro.runner import DEVICES, LIMITS, ChildFailedError, Job, Totals, run_range

OK, FAILED, USAGE = 0, 1, 2
LONGEST_S = 86400
SEEDS = 2**58  # torch takes seeds below 2^64, and a configuration has 64
PASTE = """\
from pycutfuse.testing.repro import *

config = {source}
print(check(config, "{device}"))
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pycutfuse.testing.repro",
        description="Draw a configuration from a seed, run it, and judge it against float64 and "
        "PyTorch. Without --count, prints the configuration as Python.",
    )
    parser.add_argument("--family", choices=tuple(FAMILIES), default="linear", help="operators")
    parser.add_argument("--seed", type=_natural, required=True, metavar="N", help="first seed")
    parser.add_argument("--count", type=positive, metavar="M", help="run seeds N ... N+M-1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts to this file")
    parser.add_argument("--device", help="cpu or cuda[:N] (default: cuda if there is one)")
    parser.add_argument(
        "--limit",
        type=_limit,
        metavar="P",
        help="at most 2^P multiplications; another limit draws other configurations (default: "
        "33 for linear and 31 for conv on a GPU, 20 on the CPU)",
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=120.0, metavar="S", help="of one seed (default: 120 s)"
    )
    return parser


def _natural(text: str) -> int:
    value = number(text, int)
    if not 0 <= value < SEEDS:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and {SEEDS - 1}")
    return value


def _seconds(text: str) -> float:
    value = number(text, float)
    if not 0 < value <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"{value} is not above 0 and at most {LONGEST_S}")
    return value


def _limit(text: str) -> int:
    value = number(text, int)
    if not 8 <= value <= 36:
        raise argparse.ArgumentTypeError(f"{value} is not between 8 and 36")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return guarded(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.seed + (given.count or 1) > SEEDS:
        parser.error(f"--count {given.count}: no seeds after {SEEDS - 1}")
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    problem = _device_problem(device)
    if problem is None and given.json is not None:
        problem = why_no_file(given.json)
    if problem is not None:
        print(f"pycutfuse: {problem}", file=sys.stderr)
        return USAGE
    kind = torch.device(device).type
    job = Job(given.family, device, given.limit or LIMITS[given.family][kind], given.timeout)
    if kind == "cpu":
        progress("cpu: the operators run their reference path; no kernel is tested")
    if given.count is None:
        return _one(job, given.seed, given.json)
    try:
        return _many(job, range(given.seed, given.seed + given.count), given.json)
    except ChildFailedError as error:
        print(f"pycutfuse: {error}", file=sys.stderr)
        return FAILED


def _device_problem(name: str) -> str | None:
    try:
        device = torch.device(name)
    except RuntimeError:
        return f"--device {name}: use cpu or cuda[:N]"
    if device.type not in DEVICES:
        return f"--device {name}: use cpu or cuda[:N]"
    found = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        return f"--device {name}: this machine has {found} CUDA devices"
    return None


def _one(job: Job, seed: int, path: Path | None) -> int:
    config = FAMILIES[job.family](seed, 2**job.limit)
    print(PASTE.format(source=source(config), device=job.device), flush=True)
    outcome = job.run(seed)
    totals = Totals()
    totals.add(outcome)
    if path is not None:
        _write(path, job, range(seed, seed + 1), totals, 0.0)
    print(f"# {_line(outcome)}")
    for detour in outcome.detours:
        print(f"# {detour}")
    if outcome.mechanism:
        print(f"# by {outcome.mechanism}")
    return OK if totals.passed else FAILED


def _line(outcome: Outcome) -> str:
    words = f"seed {outcome.seed}: {outcome.verdict}"
    if outcome.detail:
        words += f": {' '.join(outcome.detail.split())}"
    if outcome.ratio:
        words += f" (error {outcome.ratio:.2f} of the promised"
        words += (
            f", gradients {outcome.gradient_ratio:.2f} of torch's)" * bool(outcome.gradient_ratio)
            or ")"
        )
    return words


def _many(job: Job, seeds: range, path: Path | None) -> int:
    totals, start, shown = Totals(), time.monotonic(), 0.0
    cut_off: BaseException | None = None
    try:
        for number, outcome in enumerate(run_range(job, seeds), start=1):
            totals.add(outcome)
            if outcome.verdict in FAILURES:
                print(f"{_line(outcome)}\n    {job.command(outcome.seed)}", flush=True)
            now = time.monotonic()
            if now - shown > 5.0 or number == len(seeds):
                shown = now
                counts = ", ".join(f"{n} {name}" for name, n in totals.verdicts.items() if n)
                progress(f"[{number}/{len(seeds)}] {now - start:.0f} s: {counts}")
    except (KeyboardInterrupt, ChildFailedError, OSError) as error:  # OSError: of stdout
        cut_off = error
    seeds = seeds[: totals.verdicts.total()]
    if seeds and path is not None:
        _write(path, job, seeds, totals, time.monotonic() - start)
    if cut_off is not None and not isinstance(cut_off, KeyboardInterrupt):
        raise cut_off
    if seeds:
        print(_summary(job, seeds, totals))
    if cut_off is not None:
        return INTERRUPTED
    return OK if totals.passed else FAILED


_WORDS = {
    "correct": "correct",
    "rejected": "rejected cleanly",
    "wrong": "wrong",
    "crash": "crash",
    "unclean": "unclean rejection",
}


def _summary(job: Job, seeds: range, totals: Totals) -> str:
    lines = [f"{job.family}, seeds {seeds[0]} to {seeds[-1]} on {job.device}:"]
    lines += [f"  {totals.verdicts[name]:6d} {words}" for name, words in _WORDS.items()]
    lines.append(f"  {totals.detour_count('fallback'):6d} fallbacks")
    lines.append(f"  {totals.detour_count('handover'):6d} hand-overs")
    lines += [f"  {count:6d} by {name}" for name, count in totals.mechanisms.most_common()]
    worst, gradient = totals.worst, totals.worst_gradient
    if worst is not None and gradient is not None:
        lines.append(
            f"  largest error {worst.ratio:.2f} of the promised (seed {worst.seed}; "
            f"{totals.above_promise} seeds above 1), of gradients {gradient.gradient_ratio:.2f} "
            f"of torch's (seed {gradient.seed})"
        )
    lines += [f"  {job.command(outcome.seed)}  # {outcome.verdict}" for outcome in totals.failures]
    return "\n".join(lines)


def _write(path: Path, job: Job, seeds: range, totals: Totals, seconds: float) -> None:
    cuda = job.device.startswith("cuda")
    found: dict[str, Any] = {
        "job": asdict(job),
        "seeds": [seeds[0], seeds[-1]],
        "device": torch.cuda.get_device_name(job.device) if cuda else f"CPU ({platform.machine()})",
        "torch": torch.__version__,
        "seconds": round(seconds, 1),
        "counts": dict(totals.verdicts),
        "fallbacks": totals.detour_count("fallback"),
        "handovers": totals.detour_count("handover"),
        "detours": dict(totals.detours.most_common()),
        "mechanisms": dict(totals.mechanisms.most_common()),
        "above_promise": totals.above_promise,
        "worst": asdict(totals.worst) if totals.worst else None,
        "worst_gradient": asdict(totals.worst_gradient) if totals.worst_gradient else None,
        "failures": [
            {**asdict(outcome), "command": job.command(outcome.seed)} for outcome in totals.failures
        ],
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
