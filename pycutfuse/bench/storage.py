"""JSON of a run: written, read back, and read from older formats."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pycutfuse.bench import results
from pycutfuse.bench.accuracy import Check, Errors
from pycutfuse.bench.statistics import Summary
from pycutfuse.bench.timing import Timing
from pycutfuse.bench.validation import check_run

FORMAT = 4
"""4: shapes are text and results name torch's flags; 3 had numbers. 3: host times of several
modules; 2 had Linear's. 2: every case names its tier; 1 had one."""


def to_json(run: results.Run) -> str:
    """JSON of a run. Numbers that JSON has no word for (inf, nan) are strings.

    Each result also holds ``derived``, the figures of the report; it is not read back.
    """
    data = {"format": FORMAT, **asdict(run)}
    for item, result in zip(data["cases"], run.cases, strict=True):
        item["derived"] = derived(result)
    for item, result in zip(data["forced"], run.forced, strict=True):
        item["derived"] = derived(result)
    for item, executor in zip(data["executor"], run.executor, strict=True):
        for program, result in zip(item["programs"], executor.programs, strict=True):
            program["derived"] = {**derived(result), "cost": executor.cost(result)}
    for item, sizes in zip(data["sizes"], run.sizes, strict=True):
        item["derived"] = {
            "passed": sizes.passed,
            "worst": min(sizes.ratios(), default=None),
            "losers": [str(entry) for entry in sizes.losers],
            "mean_of_all": sizes.mean_of_all,
            "mean": sizes.mean,
            "mean_count": len(sizes.comparable),
            "worst_compile": min(sizes.ratios(results.COMPILE_TUNED), default=None),
            "taken": sizes.taken,
            "share_taken": sizes.share_taken,
            "mean_of_taken": sizes.mean_of_taken,
            "not_fused": sizes.reasons(),
        }
        for entry, size in zip(item["entries"], sizes.entries, strict=True):
            entry["derived"] = {"ratio": size.ratio(), "passed": size.passed}
    for item, host in zip(data["host"], run.host, strict=True):
        item["derived"] = {"no_grad": host.no_grad, "grad": host.grad}
    return json.dumps(_plain(data), indent=1, allow_nan=False) + "\n"


def derived(result: results.CaseResult) -> dict[str, Any]:
    """Figures that follow from a result: ratios, rates, share of the floor."""
    figures: dict[str, Any] = {"passed": result.passed, "error_ratio": result.error_ratio}
    for name in (results.OURS, results.FROZEN):
        seconds = result.seconds(name)
        if seconds is None:
            continue
        figures[name] = {
            "speedup": result.speedup(name),
            "speedup_compile": result.speedup(name, results.COMPILED),
            "bytes_per_s": result.bytes / seconds,
            "flop_per_s": result.flop / seconds,
            "share_of_floor": result.floor_s / seconds,
        }
    return figures


def from_json(text: str) -> results.Run:
    """Run from its JSON, of this format or an older one.

    Raises
    ------
    ValueError
        If the text is no result of a known format.
    """
    try:
        data = json.loads(text)
        if data["format"] == 1:
            data = _from_format_1(data)
        if data["format"] == 2:
            data = _from_format_2(data)
        if data["format"] == 3:
            data = _from_format_3(data)
        if data["format"] != FORMAT:
            raise ValueError(
                f"format {data['format']!r}; this version reads 1 to {FORMAT}: measure again with "
                "python -m pycutfuse bench --json FILE"
            )
        run = results.Run(
            environment=data["environment"],
            settings=data["settings"],
            cases=[_case(item) for item in data["cases"]],
            executor=[
                results.ExecutorResult(item["name"], [_case(p) for p in item["programs"]])
                for item in data["executor"]
            ],
            sizes=[
                results.SizesResult(
                    **{**_stored(item), "entries": [_size(entry) for entry in item["entries"]]}
                )
                for item in data["sizes"]
            ],
            forced=[_case(item) for item in data["forced"]],
            fuzz=[results.Fuzz(**{**item, "seeds": tuple(item["seeds"])}) for item in data["fuzz"]],
            skipped=data["skipped"],
            host=[results.HostOverhead(**_stored(item)) for item in data["host"]],
        )
    except (KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(f"not a result of pycutfuse bench: {error!r}") from error
    check_run(run)
    return run


def read(path: str | Path) -> results.Run:
    """`from_json` of a file; an error names it."""
    try:
        return from_json(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write(path: str | Path, run: results.Run) -> None:
    """Write the JSON of `run`; whoever is cut off while writing leaves the old file.

    What is not a file, such as ``/dev/stdout``, is written to and not replaced.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        path.write_text(to_json(run), encoding="utf-8")
        return
    path = path.resolve()  # a link stays one
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(to_json(run), encoding="utf-8")
    os.replace(unfinished, path)


def _from_format_1(data: dict[str, Any]) -> dict[str, Any]:
    def upgraded(case: dict[str, Any]) -> dict[str, Any]:
        case = {**case, "tier": data["tier"]}
        first = case["ran"].split()[1] if case["ran"] else ""
        fused = case.pop("fused")
        return {**case, "path": "fused" if fused else first}

    executor = [
        {**item, "programs": [upgraded(program) for program in item["programs"]]}
        for item in data["executor"]
    ]
    new: dict[str, Any] = {"sizes": [], "forced": [], "fuzz": [], "skipped": {}}
    cases = [upgraded(case) for case in data["cases"]]
    return {**data, **new, "format": 2, "cases": cases, "executor": executor}


def _from_format_2(data: dict[str, Any]) -> dict[str, Any]:
    host = [] if data["host"] is None else [data["host"]]
    return {**data, "format": 3, "host": host}


def _from_format_3(data: dict[str, Any]) -> dict[str, Any]:
    def upgraded(case: dict[str, Any]) -> dict[str, Any]:
        first, *others = case["shape"]
        return {**case, "shape": f"{first}x{'-'.join(map(str, others))}"}

    def upgraded_size(entry: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in entry.items() if name not in ("m", "n", "k")}
        return {**kept, "shape": f"{entry['m']}x{entry['n']}x{entry['k']}"}

    executor = [
        {**item, "programs": [upgraded(program) for program in item["programs"]]}
        for item in data["executor"]
    ]
    sizes = [
        {**item, "entries": [upgraded_size(entry) for entry in item["entries"]]}
        for item in data["sizes"]
    ]
    cases, forced = ([upgraded(case) for case in data[name]] for name in ("cases", "forced"))
    new = {"cases": cases, "executor": executor, "sizes": sizes, "forced": forced}
    return {**data, **new, "format": 4}


def _stored(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != "derived"}


def _case(data: dict[str, Any]) -> results.CaseResult:
    memory = data["memory"]
    timings = {
        name: Timing(Summary(**item["seconds"]), item["regime"])
        for name, item in data["timings"].items()
    }
    known = {
        **_stored(data),
        "checks": _checks(data["checks"]),
        "timings": timings,
        "memory": None if memory is None else results.Memory(**memory),
    }
    return results.CaseResult(**known)


def _size(data: dict[str, Any]) -> results.SizeResult:
    return results.SizeResult(**{**_stored(data), "checks": _checks(data["checks"])})


def _checks(data: list[dict[str, Any]]) -> list[Check]:
    return [Check(c["what"], _errors(c["ours"]), _errors(c["torch"]), c["limit"]) for c in data]


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
