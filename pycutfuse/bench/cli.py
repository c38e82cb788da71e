"""``python -m pycutfuse bench`` and ``python -m pycutfuse verify FILE``.

Exit codes: 0 everything passed, 1 a check failed, 2 the command or its input makes no sense.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pycutfuse.bench.results import Run

OK, FAILED, USAGE = 0, 1, 2


def add_arguments(subparsers: Any) -> None:
    """Register ``bench`` and ``verify`` on the subparsers of ``python -m pycutfuse``."""
    bench = subparsers.add_parser(
        "bench",
        help="verify every case against float64, then time it beside PyTorch",
        description="Verify every case against float64, then time it beside PyTorch eager and "
        "torch.compile. Without a GPU the reference path is verified at reduced sizes.",
    )
    bench.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="NAME",
        help="a case, or a pattern with * ? []; may be given several times (default: all)",
    )
    bench.add_argument("--tier", choices=("ieee", "tf32"), default="ieee", help="precision tier")
    bench.add_argument("--json", metavar="PATH", type=Path, help="write all figures to this file")
    bench.add_argument("--plot", metavar="PATH", type=Path, help="draw a bar chart to this PNG")
    bench.add_argument("--list", action="store_true", help="name the cases and stop")
    bench.add_argument(
        "--quick", action="store_true", help="short slices, and torch.compile is left out"
    )
    bench.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    bench.add_argument(
        "--from-json",
        metavar="PATH",
        type=Path,
        help="run nothing: report, plot or update from a file that --json wrote",
    )
    bench.add_argument(
        "--update-readme",
        metavar="FILE",
        type=Path,
        help="write the tables between <!-- results:begin --> and <!-- results:end --> of FILE",
    )
    bench.set_defaults(run=run_bench)

    verify = subparsers.add_parser(
        "verify",
        help="compare ModelNew of a file with its Model against float64",
        description="FILE defines Model, ModelNew, get_inputs() and get_init_inputs(). Parameters "
        "must be bitwise equal at the same seed, state_dict keys equal, and ModelNew's error "
        "against a float64 copy of Model at most PyTorch's own, in train and eval mode.",
    )
    verify.add_argument("file", metavar="FILE", type=Path, help="a Python file")
    verify.add_argument("--device", help="cpu or cuda[:N] (default: cuda if there is one)")
    verify.add_argument("--seed", type=int, default=0, help="of parameters and data (default: 0)")
    verify.add_argument(
        "--batch",
        type=_positive,
        metavar="N",
        help="cut the inputs' leading dimension to N (default: 256 on the CPU, uncut on a GPU)",
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
        )
    except ProblemError as error:
        return _complain(str(error))
    return OK if result.passed else FAILED


def run_bench(arguments: argparse.Namespace) -> int:
    """``bench``: exit code 0 if every case passes, 1 if one fails, 2 for impossible wishes."""
    from pycutfuse.bench import cases, plot, report, results

    try:
        chosen = cases.select(arguments.case)
        if arguments.list:
            print("\n".join(case.name for case in chosen))
            return OK
        if arguments.tier != "ieee":
            return _complain(
                f"--tier {arguments.tier} has not landed in this version; --tier ieee has"
            )
        if arguments.plot is not None:
            plot.require()
            if arguments.plot.suffix.lower() != ".png":
                return _complain(f"--plot {arguments.plot}: a name ending in .png is needed")
        for path in (arguments.json, arguments.plot):
            if path is not None and not path.resolve().parent.is_dir():
                return _complain(f"{path}: the folder {path.resolve().parent} does not exist")
        if arguments.update_readme is not None:
            # Now, not after minutes of measuring: are the markers there?
            report.update_region(arguments.update_readme.read_text(encoding="utf-8"), "")
        if arguments.from_json is not None:
            run = results.read(arguments.from_json)
        else:
            run = _measure(arguments)
    except (ValueError, OSError, plot.PlotError) as error:
        return _complain(str(error))
    print(report.text(run))
    try:
        if arguments.json is not None:
            arguments.json.write_text(results.to_json(run), encoding="utf-8")
        if arguments.update_readme is not None:
            changed = report.update_readme(arguments.update_readme, run)
            print(f"{arguments.update_readme}: {'updated' if changed else 'up to date'}")
        if arguments.plot is not None and (run.on_gpu or arguments.from_json is not None):
            plot.draw(run, arguments.plot)
        elif arguments.plot is not None:
            print(f"{arguments.plot}: not drawn, since nothing was timed")
    except (ValueError, OSError, plot.PlotError) as error:
        return _complain(str(error))
    return OK if run.passed else FAILED


def _measure(arguments: argparse.Namespace) -> Run:
    import torch

    from pycutfuse.bench import environment, runner
    from pycutfuse.bench.cases import ExecutorCase, select
    from pycutfuse.bench.host import host_overhead
    from pycutfuse.bench.results import CaseResult, ExecutorResult, Run, to_json
    from pycutfuse.bench.timing import Settings

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = runner.Options(
        tier=arguments.tier,
        compile=not (arguments.no_compile or arguments.quick),
        settings=Settings(slice_s=0.05, rounds=2) if arguments.quick else Settings(),
    )
    chosen = select(arguments.case)
    if device.type == "cpu":
        runner.progress("no GPU: the reference path runs at reduced sizes and nothing is timed")
        chosen = [case.reduced() for case in chosen]
    run = Run(
        environment.describe(), options.tier, {**asdict(options), "idle": environment.clocks()}
    )
    for number, case in enumerate(chosen, start=1):
        runner.progress(f"[{number}/{len(chosen)}] {case.name}")
        try:
            if isinstance(case, ExecutorCase):
                run.executor.append(runner.run_executor(case, options, device))
            else:
                run.cases.append(runner.run_case(case, options, device))
        except Exception as error:  # one broken case must not cost the results of the others
            traceback.print_exc()
            shape = (case.shape.m, case.shape.k, case.shape.n)
            reason = {"case": f"{type(error).__name__}: {error}"}
            broken = CaseResult(case.name, "", shape, False, [], failures=reason)
            if isinstance(case, ExecutorCase):
                run.executor.append(ExecutorResult(case.name, [broken]))
            else:
                run.cases.append(broken)
        if arguments.json is not None:  # a run that is cut off leaves what it has found
            arguments.json.write_text(to_json(run), encoding="utf-8")
    if device.type == "cuda":
        runner.progress("host overhead")
        run = replace(run, host=host_overhead(device))
    return run


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _complain(text: str) -> int:
    print(f"pycutfuse: {' '.join(text.split())}", file=sys.stderr)
    return USAGE
