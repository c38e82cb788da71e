"""``python -m pycutfuse bench`` and ``python -m pycutfuse verify FILE``.

Exit codes: 0 everything passed, 1 a check failed, 2 the command or its input makes no sense.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycutfuse._console import number, positive, why_no_file

if TYPE_CHECKING:
    from pycutfuse.bench.results import Run
    from pycutfuse.bench.session import Plan

OK, FAILED, USAGE = 0, 1, 2


def add_arguments(subparsers: Any) -> None:
    """Register ``bench`` and ``verify`` on the subparsers of ``python -m pycutfuse``."""
    bench = subparsers.add_parser(
        "bench",
        help="verify every case against float64, then time it beside PyTorch",
        description="Verify every case against float64, then time it beside PyTorch eager and "
        "torch.compile. Without a GPU the reference path is verified at reduced sizes.",
    )
    add = bench.add_argument
    add(
        "--case",
        action="append",
        default=[],
        metavar="NAME",
        help="a case, or a pattern with * ? []; may be given several times (default: all)",
    )
    add(
        "--tier",
        choices=("ieee", "tf32", "fp16", "bf16", "all"),
        help="dtype and flags, the same for PyTorch: ieee is fp32 with TF32 off, PyTorch's default "
        "for matrix products; tf32 is fp32 with TF32 allowed, its default for convolutions; fp16 "
        "and bf16 are tensors of that dtype (default: ieee)",
    )
    add("--list", action="store_true", help="name the cases and stop")
    add(
        "--quick",
        action="store_true",
        help="short slices and fewer random sizes, and torch.compile is left out",
    )
    add("--no-compile", action="store_true", help="leave torch.compile out")
    add("--no-max-autotune", action="store_true", help="leave its max-autotune out: the slow one")
    add("--json", metavar="FILE", type=Path, help="write all figures to this file")
    add(
        "--merge",
        metavar="FILE",
        type=Path,
        help="as --json, but add to what FILE holds; refused if it was measured on another GPU, "
        "with other versions or another build",
    )
    add(
        "--fuzz",
        action="append",
        default=[],
        metavar="FILE",
        type=Path,
        help="take in the counts that python -m pycutfuse.testing.repro --json wrote",
    )
    add("--plot", metavar="FILE", type=Path, help="draw a bar chart to this PNG")
    add(
        "--from-json",
        metavar="FILE",
        type=Path,
        help="run nothing: report, merge, plot or update from a file that --json wrote",
    )
    add(
        "--update-readme",
        metavar="FILE",
        type=Path,
        help="write the tables between <!-- results:begin --> and <!-- results:end --> of FILE",
    )
    add(
        "--section",
        metavar="NAME",
        help="with --update-readme, between <!-- results:begin NAME --> and <!-- results:end NAME "
        "-->, for a file that reports several runs",
    )
    bench.set_defaults(run=run_bench)
    _add_verify(subparsers)


def _add_verify(subparsers: Any) -> None:
    verify = subparsers.add_parser(
        "verify",
        help="compare ModelNew of a file with its Model against float64",
        description="FILE defines Model, ModelNew, get_inputs() and get_init_inputs(). Parameters "
        "must be bitwise equal at the same seed, state_dict keys equal, and ModelNew's error "
        "against a float64 copy of Model at most the larger of PyTorch's own and the tier's "
        "rounding, in train and eval mode.",
    )
    verify.add_argument("file", metavar="FILE", type=Path, help="a Python file")
    verify.add_argument("--device", help="cpu or cuda[:N] (default: cuda if there is one)")
    verify.add_argument("--seed", type=_seed, default=0, help="of parameters and data (default: 0)")
    verify.add_argument(
        "--batch",
        type=positive,
        metavar="N",
        help="cut the inputs' leading dimension to N (default: uncut on a GPU; on the "
        "CPU 256, or as many as have 2^20 elements)",
    )
    verify.add_argument(
        "--tier",
        choices=("ieee", "tf32"),
        default="ieee",
        help="torch's flags for fp32, and the rounding that always passes: ieee is TF32 off and "
        "2^-22; tf32, PyTorch's default for convolutions, is TF32 allowed and 2^-10 (default: "
        "ieee). Other dtypes pass with their own rounding",
    )
    verify.set_defaults(run=run_verify)


def run_verify(arguments: argparse.Namespace) -> int:
    """``verify``: exit code 0 if ModelNew passes, 1 if not, 2 if the file cannot be used."""
    from pycutfuse.bench.problem import ProblemError
    from pycutfuse.bench.verify import verify_file

    try:
        result = verify_file(
            arguments.file,
            device=arguments.device,
            seed=arguments.seed,
            batch=arguments.batch,
            tier=arguments.tier,
        )
    except ProblemError as error:
        return _complain(str(error))
    return OK if result.passed else FAILED


def run_bench(arguments: argparse.Namespace) -> int:
    """``bench``: exit code 0 if every case passes, 1 if one fails, 2 for impossible wishes."""
    from pycutfuse.bench import plot, report

    if arguments.list:
        return _list(arguments)
    try:
        _check_contradictions(arguments)
        _check_wishes(arguments)
        run = _obtain(arguments)
        text = report.text(run)
    except (ValueError, OSError, plot.PlotError) as error:
        return _complain(str(error))
    try:
        said = _write(arguments, run)  # before the report, which nobody may read to its end
    except (ValueError, OSError, plot.PlotError) as error:
        print(text)
        return _complain(str(error))
    print("\n".join([text, *said]))
    return OK if run.passed else FAILED


def _list(arguments: argparse.Namespace) -> int:
    from pycutfuse.bench import cases

    try:
        _check_contradictions(arguments)
        chosen = cases.select(arguments.case)
    except ValueError as error:
        return _complain(str(error))
    print("\n".join(case.name for case in chosen))
    return OK


def _write(arguments: argparse.Namespace, run: Run) -> list[str]:
    """Write the files that were asked for; what to say of them."""
    from pycutfuse.bench import plot, report, storage

    said = []
    for path in (arguments.json, arguments.merge):
        if path is not None:
            storage.write(path, run)
    if arguments.update_readme is not None:
        changed = report.update_readme(arguments.update_readme, run, arguments.section)
        said.append(f"{arguments.update_readme}: {'updated' if changed else 'up to date'}")
    if arguments.plot is not None and (run.on_gpu or arguments.from_json is not None):
        plot.draw(run, arguments.plot)
    elif arguments.plot is not None:
        said.append(f"{arguments.plot}: not drawn, since nothing was timed")
    return said


def _check_contradictions(arguments: argparse.Namespace) -> None:
    """Refuse options that --list or --from-json would not read."""
    ignored = ["tier", "quick", "no_compile", "no_max_autotune"]
    if arguments.list:
        kept = "--list"
        ignored += ["json", "merge", "fuzz", "plot", "from_json", "update_readme", "section"]
    elif arguments.from_json is not None:
        kept = "--from-json"
        ignored += ["case"]
    else:
        return
    for name in ignored:
        if getattr(arguments, name):
            raise ValueError(f"{kept} runs nothing: --{name.replace('_', '-')} means nothing there")


def _check_wishes(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be done now, not after minutes of measuring."""
    from pycutfuse.bench import plot, report

    if arguments.json is not None and arguments.merge is not None:
        raise ValueError("--json starts a file and --merge adds to one: give one of them")
    if arguments.plot is not None:
        plot.require()
        if arguments.plot.suffix.lower() != ".png":
            raise ValueError(f"--plot {arguments.plot}: a name ending in .png is needed")
    for path in (arguments.json, arguments.merge, arguments.plot, arguments.update_readme):
        problem = None if path is None else why_no_file(path)
        if problem is not None:
            raise ValueError(problem)
    if len({path.resolve() for path in arguments.fuzz}) < len(arguments.fuzz):
        raise ValueError("--fuzz names a file twice: its counts would be added twice")
    if arguments.section is not None and arguments.update_readme is None:
        raise ValueError("--section names a part of a file: give --update-readme FILE too")
    if arguments.update_readme is not None:
        document = arguments.update_readme.read_text(encoding="utf-8")
        report.update_region(document, "", arguments.section)


def _obtain(arguments: argparse.Namespace) -> Run:
    """The run that is reported: measured or read, then merged, with the fuzzer's counts."""
    from pycutfuse.bench import environment, merging, storage

    old = None
    if arguments.merge is not None and arguments.merge.exists():
        old = storage.read(arguments.merge)

    def joined(run: Run) -> Run:
        return run if old is None else merging.merge(old, run)

    if arguments.from_json is not None:
        run = storage.read(arguments.from_json)
        fuzz = [merging.read_fuzz(path, run.environment) for path in arguments.fuzz]
        return joined(replace(run, fuzz=[*run.fuzz, *fuzz]))
    where = environment.describe()
    fuzz = [merging.read_fuzz(path, where) for path in arguments.fuzz]
    plan = _plan(arguments)
    if old is not None:
        merging.check_same(old, where, plan.settings)
    path = arguments.json or arguments.merge

    def keep(run: Run) -> None:
        if path is not None:
            storage.write(path, joined(run))

    return joined(replace(_measure(plan, keep), fuzz=fuzz))


def _plan(arguments: argparse.Namespace) -> Plan:
    from pycutfuse.bench import cases, session, tiers

    chosen = cases.select(arguments.case)
    wanted = tiers.choose(arguments.tier or "ieee")
    for case in chosen if arguments.case else ():
        if not any(cases.runs_at(case, tier.name) for tier in wanted):
            raise ValueError(f"--case {case.name} is measured at --tier ieee only")
    return session.Plan(
        cases=chosen,
        tiers=wanted,
        quick=arguments.quick,
        compile=not arguments.no_compile,
        tuned=not arguments.no_max_autotune,
        host=tiers.TIERS["ieee"] in wanted,
    )


def _measure(plan: Plan, keep: Callable[[Run], None]) -> Run:
    from pycutfuse.bench import session

    return session.measure(plan, keep)


def _seed(text: str) -> int:
    value = number(text, int)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 2^63 - 1")
    return value


def _complain(text: str) -> int:
    print(f"pycutfuse: {' '.join(text.split())}", file=sys.stderr)
    return USAGE
