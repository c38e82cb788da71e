"""Results of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pycutfuse.bench.accuracy import Check
from pycutfuse.bench.statistics import geometric_mean
from pycutfuse.bench.timing import Timing

EAGER = "eager"
EAGER_TF32 = "eager TF32"
COMPILE = "compile"
COMPILE_TUNED = "compile max-autotune"
OURS = "pycutfuse"
FROZEN = "pycutfuse frozen"
VARIANTS = (EAGER, EAGER_TF32, COMPILE, COMPILE_TUNED, OURS, FROZEN)
"""In the order of the report's columns."""

COMPILED = (COMPILE, COMPILE_TUNED)
BASELINES = (EAGER, *COMPILED)
"""PyTorch at the tier's flags and dtype; ratios are to the fastest of these."""

NO_SLOWER = 0.95
"""A random size is a loser below this share of eager's speed."""

COMPARABLE_FLOOR_S = 20e-6
"""Random sizes count in the mean from this floor on: below it launches decide."""


@dataclass(frozen=True)
class Memory:
    """Bytes of device memory: parameters, buffers and inputs, and the most on top in one call."""

    resident: int
    eager: int
    ours: int
    planes: int
    slack: float = 1.1

    @property
    def allowed(self) -> float:
        """`slack` times eager's peak and the planes."""
        return self.slack * (self.resident + self.eager) + self.planes

    @property
    def kept(self) -> bool:
        """True if our peak is within what is allowed."""
        return self.resident + self.ours <= self.allowed


@dataclass(frozen=True)
class CaseResult:
    """Everything found about one case; `timings` is empty if it failed or no GPU ran it.

    `path` is that of `pycutfuse.bench.route.Route`; a case that is not ``"fused"`` is not timed.
    `ran` says in words which kernel ran, or why PyTorch did. `fp32_precision` is what torch's flags
    said while it was measured, see `pycutfuse.bench.flags.in_force`.
    """

    name: str
    chain: str
    shape: str
    training: bool
    checks: list[Check]
    tier: str = "ieee"
    path: str = ""
    ran: str = ""
    timings: dict[str, Timing] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    memory: Memory | None = None
    bytes: int = 0
    flop: int = 0
    floor_s: float = 0.0
    floor_kind: str = ""
    clocks: dict[str, float] | None = None
    fp32_precision: dict[str, str] = field(default_factory=dict)

    @property
    def fused(self) -> bool:
        """False if PyTorch computed our result, or a part of it."""
        return self.path == "fused"

    @property
    def passed(self) -> bool:
        """True if the case was verified and no check failed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def error_ratio(self) -> float:
        """Our error over the allowed one, the worst of all checks."""
        return max((check.ratio for check in self.checks), default=math.inf)

    def seconds(self, variant: str) -> float | None:
        """Median time of a variant, None if it was not timed."""
        timing = self.timings.get(variant)
        return None if timing is None else timing.seconds.median

    def best(self, variants: Sequence[str]) -> tuple[str, float] | None:
        """The fastest of the variants that were timed and its median."""
        times = {name: s for name in variants if (s := self.seconds(name)) is not None}
        return min(times.items(), key=lambda item: item[1]) if times else None

    @property
    def baseline(self) -> tuple[str, float] | None:
        """The fastest PyTorch variant at the tier's flags and dtype, and its median."""
        return self.best(BASELINES)

    def speedup(self, variant: str, against: Sequence[str] = BASELINES) -> float | None:
        """Time of the fastest of `against` over the variant's."""
        seconds, best = self.seconds(variant), self.best(against)
        return None if seconds is None or best is None else best[1] / seconds


@dataclass(frozen=True)
class ExecutorResult:
    """Programs of different lengths on one shape; the first, the bias alone, is the base."""

    name: str
    programs: list[CaseResult]

    @property
    def passed(self) -> bool:
        """True if every program passed its checks."""
        return bool(self.programs) and all(program.passed for program in self.programs)

    def cost(self, program: CaseResult) -> float | None:
        """Extra time of a program over the bias alone, as a fraction."""
        base, seconds = self.programs[0].seconds(OURS), program.seconds(OURS)
        return None if base is None or seconds is None else seconds / base - 1


@dataclass(frozen=True)
class SizeResult:
    """One size: medians in seconds by variant, empty if it failed or no GPU ran it.

    `path` and `reason` are those of `pycutfuse.bench.route.Route`. `first_ratio` is the ratio to
    eager before a loser was timed once more, None where it was not. `failure` is what it raised.
    """

    shape: str
    checks: list[Check]
    path: str = ""
    reason: str = ""
    floor_s: float = 0.0
    times: dict[str, float] = field(default_factory=dict)
    regime: str = ""
    first_ratio: float | None = None
    failure: str = ""

    @property
    def passed(self) -> bool:
        """True if it ran, was verified and no check failed."""
        return not self.failure and bool(self.checks) and all(c.passed for c in self.checks)

    def ratio(self, against: str | None = None) -> float | None:
        """Time of `against` over ours; by default of the faster of eager and what was compiled."""
        names = (EAGER, COMPILE) if against is None else (against,)
        ours, theirs = self.times.get(OURS), [self.times[n] for n in names if n in self.times]
        return None if ours is None or not theirs else min(theirs) / ours

    def __str__(self) -> str:
        return self.shape


@dataclass(frozen=True)
class SizesResult:
    """All random sizes at one tier; `fp32_precision` as `CaseResult`'s."""

    name: str
    tier: str
    entries: list[SizeResult]
    fp32_precision: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if every size passed."""
        return bool(self.entries) and all(entry.passed for entry in self.entries)

    def ratios(self, against: str | None = None) -> list[float]:
        """Of the sizes that were timed, as `SizeResult.ratio`."""
        return [r for entry in self.entries if (r := entry.ratio(against)) is not None]

    @property
    def losers(self) -> list[SizeResult]:
        """Sizes where ours is still slower than PyTorch allows after it was timed again."""
        return [e for e in self.entries if (r := e.ratio()) is not None and r < NO_SLOWER]

    @property
    def comparable(self) -> list[float]:
        """Ratios of the sizes whose floor is long enough for kernels to decide."""
        return [
            r
            for e in self.entries
            if e.floor_s > COMPARABLE_FLOOR_S and (r := e.ratio()) is not None
        ]

    @property
    def mean(self) -> float | None:
        """Geometric mean of `comparable`."""
        return geometric_mean(self.comparable) if self.comparable else None

    @property
    def mean_of_all(self) -> float | None:
        """Geometric mean of all ratios."""
        return geometric_mean(self.ratios()) if self.ratios() else None

    @property
    def taken(self) -> int:
        """Sizes that our kernels ran."""
        return sum(entry.path == "fused" for entry in self.entries)

    @property
    def share_taken(self) -> float:
        """`taken` of all sizes."""
        return self.taken / len(self.entries) if self.entries else 0.0

    @property
    def mean_of_taken(self) -> float | None:
        """Geometric mean of the ratios of what our kernels ran."""
        ratios = [e.ratio() for e in self.entries if e.path == "fused"]
        found = [ratio for ratio in ratios if ratio is not None]
        return geometric_mean(found) if found else None

    def reasons(self) -> dict[str, int]:
        """Path and reason of the sizes that PyTorch ran for us, and how many there are."""
        found: dict[str, int] = {}
        for entry in self.entries:
            if entry.path and entry.path != "fused":
                reason = f"{entry.path}: {entry.reason}"
                found[reason] = found.get(reason, 0) + 1
        return found


@dataclass(frozen=True)
class HostOverhead:
    """Host time of an eager call of a module, in seconds; an empty launch for comparison."""

    empty_launch: float
    ours_no_grad: float
    ours_grad: float
    eager_no_grad: float
    eager_grad: float
    ran: str
    module: str = "Linear"

    @property
    def no_grad(self) -> float:
        """Our call over an empty launch, without gradients."""
        return self.ours_no_grad - self.empty_launch

    @property
    def grad(self) -> float:
        """Our call over an empty launch, recording for backward."""
        return self.ours_grad - self.empty_launch


@dataclass(frozen=True)
class Fuzz:
    """Counts of a range of seeds, from ``python -m pycutfuse.testing.repro --json``.

    `mechanisms` are what convolutions ran by.
    """

    family: str
    seeds: tuple[int, int]
    device: str
    counts: dict[str, int]
    handovers: int = 0
    fallbacks: int = 0
    mechanisms: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Configurations that were run."""
        return sum(self.counts.values())

    @property
    def passed(self) -> bool:
        """True if every configuration was correct or rejected cleanly."""
        return self.total == sum(self.counts.get(name, 0) for name in ("correct", "rejected"))


@dataclass(frozen=True)
class Run:
    """One run of the benchmark, or several of one environment.

    `forced` holds one result for each forced policy; `skipped` says why a case was not run.
    """

    environment: dict[str, Any]
    settings: dict[str, Any]
    cases: list[CaseResult] = field(default_factory=list)
    executor: list[ExecutorResult] = field(default_factory=list)
    sizes: list[SizesResult] = field(default_factory=list)
    forced: list[CaseResult] = field(default_factory=list)
    fuzz: list[Fuzz] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    host: list[HostOverhead] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if there is a case, and every one passed its checks."""
        return self.count > 0 and not self.failed

    @property
    def failed(self) -> list[str]:
        """Names of what did not pass, with their tiers where there are several."""
        at_a_tier: list[CaseResult | SizesResult] = [*self.cases, *self.forced, *self.sizes]
        found = [f"{item.name} ({item.tier})" for item in at_a_tier if not item.passed]
        found += [executor.name for executor in self.executor if not executor.passed]
        return found + [f"fuzz {fuzz.family}" for fuzz in self.fuzz if not fuzz.passed]

    @property
    def count(self) -> int:
        """How many results there are, each random size being one."""
        sizes = sum(len(result.entries) for result in self.sizes)
        return len(self.cases) + len(self.executor) + len(self.forced) + sizes

    @property
    def on_gpu(self) -> bool:
        """False if the reference path ran on the CPU at reduced sizes."""
        return self.environment.get("gpu") is not None
