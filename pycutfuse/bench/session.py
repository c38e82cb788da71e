"""A run of the benchmark: every chosen case at every chosen tier, kept as it goes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from pycutfuse._console import progress
from pycutfuse.bench import environment, forced, runner, sizes
from pycutfuse.bench.case import AnyCase, ExecutorCase, ForcedCase, SizesCase
from pycutfuse.bench.cases import runs_at
from pycutfuse.bench.host import host_overhead
from pycutfuse.bench.results import CaseResult, ExecutorResult, Run, SizesResult
from pycutfuse.bench.runner import Options
from pycutfuse.bench.tiers import Tier
from pycutfuse.bench.timing import Settings

QUICK = Settings(slice_s=0.05, rounds=2)


@dataclass(frozen=True)
class Plan:
    """What a command asks for.

    Attributes
    ----------
    cases : list
        From `pycutfuse.bench.cases.select`.
    tiers : list of Tier
    quick : bool
        Short slices, fewer random sizes, and torch.compile is left out.
    compile, tuned : bool
        Whether to time torch.compile, and its max-autotune.
    host : bool
        Whether to measure the host's overhead at the end.
    """

    cases: Sequence[AnyCase]
    tiers: Sequence[Tier]
    quick: bool = False
    compile: bool = True
    tuned: bool = True
    host: bool = True

    @property
    def options(self) -> Options:
        """Options of the runner, at the first tier."""
        compiled = self.compile and not self.quick
        settings = QUICK if self.quick else Settings()
        return Options(self.tiers[0].name, compiled, compiled and self.tuned, settings)

    @property
    def settings(self) -> dict[str, Any]:
        """What a result file says about how it was measured."""
        found = asdict(self.options)
        del found["tier"]
        return found


def measure(plan: Plan, keep: Callable[[Run], None]) -> Run:
    """Verify and, on a GPU, time. `keep` gets the run after each case: it may be cut off."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = list(plan.cases)
    if plan.quick:
        chosen = [case.quick() if isinstance(case, SizesCase) else case for case in chosen]
    if device.type == "cpu":
        progress("no GPU: the reference path runs at reduced sizes and nothing is timed")
        chosen = [case.reduced() for case in chosen]
    run = Run(environment.describe(), {**plan.settings, "idle": environment.clocks()})
    todo = [(tier, case) for tier in plan.tiers for case in chosen if runs_at(case, tier.name)]
    for number, (tier, case) in enumerate(todo, start=1):
        progress(f"[{number}/{len(todo)}] {case.name} ({tier.name})")
        _add(run, case, replace(plan.options, tier=tier.name), device)
        keep(run)
    if device.type == "cuda" and plan.host:
        progress("host overhead")
        run = replace(run, host=host_overhead(device))
        keep(run)
    return run


def _add(run: Run, case: AnyCase, options: Options, device: torch.device) -> None:
    """Run one case; if it breaks that is its result, and does not cost those of the others."""
    try:
        if isinstance(case, SizesCase):
            run.sizes.append(sizes.run_sizes(case, options, device))
        elif isinstance(case, ForcedCase):
            reason = forced.why_skipped(case, device)
            if reason is not None:
                run.skipped[case.name] = reason
            else:
                run.forced.extend(forced.run_forced(case, options, device))
        elif isinstance(case, ExecutorCase):
            run.executor.append(runner.run_executor(case, options, device))
        else:
            run.cases.append(runner.run_case(case, options, device))
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        if isinstance(case, SizesCase):
            run.skipped[case.name] = reason
            run.sizes.append(SizesResult(case.name, options.tier, []))
            return
        broken = CaseResult(
            case.name, "", str(case.shape), False, [], options.tier, failures={"case": reason}
        )
        if isinstance(case, ForcedCase):
            run.forced.append(broken)
        elif isinstance(case, ExecutorCase):
            run.executor.append(ExecutorResult(case.name, [broken]))
        else:
            run.cases.append(broken)
