"""Results of a run, and their JSON form."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pycutfuse.bench.accuracy import Check, Errors
from pycutfuse.bench.statistics import Summary
from pycutfuse.bench.timing import Timing

FORMAT = 1

EAGER = "eager"
EAGER_TF32 = "eager TF32"
COMPILE = "compile"
COMPILE_TUNED = "compile max-autotune"
OURS = "pycutfuse"
FROZEN = "pycutfuse frozen"
VARIANTS = (EAGER, EAGER_TF32, COMPILE, COMPILE_TUNED, OURS, FROZEN)
"""In the order of the report's columns."""

BASELINES = (EAGER, COMPILE, COMPILE_TUNED)
"""PyTorch at the user's flags; ratios are to the fastest of these."""


@dataclass(frozen=True)
class Memory:
    """Bytes of device memory: parameters, buffers and inputs, and the most on top in one call."""

    resident: int
    eager: int
    ours: int
    planes: int

    @property
    def allowed(self) -> float:
        """1.1 times eager's peak and the planes (DESIGN.md: both are shown)."""
        return 1.1 * (self.resident + self.eager) + self.planes


@dataclass(frozen=True)
class CaseResult:
    """Everything found about one case; `timings` is empty if it failed or no GPU ran it.

    `fused` is False if PyTorch computed our result; `ran` says in words why, or which kernel did.
    """

    name: str
    chain: str
    shape: tuple[int, int, int]
    training: bool
    checks: list[Check]
    fused: bool = False
    ran: str = ""
    timings: dict[str, Timing] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    memory: Memory | None = None
    bytes: int = 0
    flop: int = 0
    floor_s: float = 0.0
    floor_kind: str = ""
    clocks: dict[str, float] | None = None

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

    @property
    def baseline(self) -> tuple[str, float] | None:
        """The fastest PyTorch variant at the user's flags and its median."""
        times = {name: s for name in BASELINES if (s := self.seconds(name)) is not None}
        return min(times.items(), key=lambda item: item[1]) if times else None

    def speedup(self, variant: str) -> float | None:
        """Baseline's time over the variant's."""
        seconds, baseline = self.seconds(variant), self.baseline
        return None if seconds is None or baseline is None else baseline[1] / seconds


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
class HostOverhead:
    """Host time of an eager call on a tiny problem, in seconds; an empty launch for comparison."""

    empty_launch: float
    ours_no_grad: float
    ours_grad: float
    eager_no_grad: float
    eager_grad: float
    ran: str

    @property
    def no_grad(self) -> float:
        """Our call over an empty launch, without gradients."""
        return self.ours_no_grad - self.empty_launch

    @property
    def grad(self) -> float:
        """Our call over an empty launch, recording for backward."""
        return self.ours_grad - self.empty_launch


@dataclass(frozen=True)
class Run:
    """One run of the benchmark."""

    environment: dict[str, Any]
    tier: str
    settings: dict[str, Any]
    cases: list[CaseResult] = field(default_factory=list)
    executor: list[ExecutorResult] = field(default_factory=list)
    host: HostOverhead | None = None

    @property
    def passed(self) -> bool:
        """True if every case passed its checks."""
        return all(result.passed for result in self.results)

    @property
    def results(self) -> list[CaseResult | ExecutorResult]:
        """All results, cases first."""
        return [*self.cases, *self.executor]

    @property
    def on_gpu(self) -> bool:
        """False if the reference path ran on the CPU at reduced sizes."""
        return self.environment.get("gpu") is not None


def to_json(run: Run) -> str:
    """JSON of a run. Numbers that JSON has no word for (inf, nan) are strings.

    Each case also holds ``derived``, the figures of the report; it is not read back.
    """
    data = {"format": FORMAT, **asdict(run)}
    for item, result in zip(data["cases"], run.cases, strict=True):
        item["derived"] = derived(result)
    for item, executor in zip(data["executor"], run.executor, strict=True):
        for program, result in zip(item["programs"], executor.programs, strict=True):
            program["derived"] = {**derived(result), "cost": executor.cost(result)}
    if run.host is not None:
        data["host"]["derived"] = {"no_grad": run.host.no_grad, "grad": run.host.grad}
    return json.dumps(_plain(data), indent=1, allow_nan=False) + "\n"


def derived(result: CaseResult) -> dict[str, Any]:
    """Figures that follow from a result: ratios, rates, share of the floor."""
    figures: dict[str, Any] = {"passed": result.passed, "error_ratio": result.error_ratio}
    for name in (OURS, FROZEN):
        seconds = result.seconds(name)
        if seconds is None:
            continue
        figures[name] = {
            "speedup": result.speedup(name),
            "bytes_per_s": result.bytes / seconds,
            "flop_per_s": result.flop / seconds,
            "share_of_floor": result.floor_s / seconds,
        }
    return figures


def from_json(text: str) -> Run:
    """Run from its JSON.

    Raises
    ------
    ValueError
        If the text is no result of this format.
    """
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r}; this version reads {FORMAT}")
        return Run(
            environment=data["environment"],
            tier=data["tier"],
            settings=data["settings"],
            cases=[_case(item) for item in data["cases"]],
            executor=[
                ExecutorResult(item["name"], [_case(p) for p in item["programs"]])
                for item in data["executor"]
            ],
            host=None if data["host"] is None else HostOverhead(**_stored(data["host"])),
        )
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"not a result of pycutfuse bench: {error!r}") from error


def read(path: str | Path) -> Run:
    """`from_json` of a file."""
    return from_json(Path(path).read_text(encoding="utf-8"))


def _stored(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != "derived"}


def _case(data: dict[str, Any]) -> CaseResult:
    memory = data["memory"]
    timings = {
        name: Timing(Summary(**item["seconds"]), item["regime"])
        for name, item in data["timings"].items()
    }
    known = {
        **_stored(data),
        "shape": tuple(data["shape"]),
        "checks": [
            Check(c["what"], _errors(c["ours"]), _errors(c["torch"]), c["limit"])
            for c in data["checks"]
        ],
        "timings": timings,
        "memory": None if memory is None else Memory(**memory),
    }
    return CaseResult(**known)


def _errors(data: dict[str, Any]) -> Errors:
    return Errors(float(data["frobenius"]), float(data["componentwise"]))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
