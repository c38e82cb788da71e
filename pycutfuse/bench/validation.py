"""What was read from a file is checked against the annotations of its dataclasses."""

from __future__ import annotations

import math
import types
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from pycutfuse.bench.results import CaseResult, Run, SizesResult
from pycutfuse.bench.tiers import TIERS


def check_types(value: Any, kind: Any, where: str) -> None:
    """Raise ValueError if `value` is not what the annotation `kind` says, `where` being its name.

    Examples
    --------
    >>> check_types([1, 2.5], list[float], "times")
    >>> check_types([1, "2"], list[float], "times")
    Traceback (most recent call last):
    ValueError: times[1] is '2'; float is needed
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return
    if origin in (Union, types.UnionType):
        if value is not None:
            check_types(value, next(one for one in inner if one is not type(None)), where)
        return
    expected: Any = (int, float) if kind is float else (origin or kind)
    if not isinstance(value, expected) or (isinstance(value, bool) and kind is not bool):
        name = getattr(origin or kind, "__name__", str(kind))
        raise ValueError(f"{where} is {value!r:.60}; {name} is needed")
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        for item in fields(kind):
            check_types(getattr(value, item.name), hints[item.name], f"{where}.{item.name}")
    elif origin is dict:
        for key, one in value.items():
            check_types(one, inner[1], f"{where}[{key!r}]")
    elif origin in (list, tuple):
        for index, one in enumerate(value):
            check_types(one, inner[0], f"{where}[{index}]")


def check_run(run: Run) -> None:
    """Refuse a run that cannot be reported.

    Raises
    ------
    ValueError
        Naming a value of the wrong type, a tier that does not exist, or a time that is none.
    """
    check_types(run, Run, "run")
    for name in ("torch", "python", "pycutfuse", *(("driver", "cuda") if run.on_gpu else ())):
        check_types(run.environment.get(name), str, f"environment[{name!r}]")
    programs = [program for result in run.executor for program in result.programs]
    for case in (*run.cases, *run.forced, *programs):
        _check_tier(case)
        for variant, timing in case.timings.items():
            for part in ("median", "p20", "p80"):
                _check_time(getattr(timing.seconds, part), f"{case.name}: {part} of {variant}")
    for sizes in run.sizes:
        _check_tier(sizes)
        for entry in sizes.entries:
            for variant, seconds in entry.times.items():
                _check_time(seconds, f"{sizes.name}: {entry}: time of {variant}")
    for result in run.executor:
        if not result.programs or any("." not in program.name for program in result.programs):
            raise ValueError(f"{result.name} has no programs, or one without a number of steps")


def _check_tier(result: CaseResult | SizesResult) -> None:
    if result.tier not in TIERS:
        raise ValueError(f"{result.name}: tier {result.tier!r} is none of {', '.join(TIERS)}")


def _check_time(seconds: float, what: str) -> None:
    if not 0 < seconds < math.inf:
        raise ValueError(f"{what} is {seconds} s; a positive number is needed")
