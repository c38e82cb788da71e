"""Results of several runs in one file: only where they were made on the same thing."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pycutfuse.bench.results import Fuzz, Run

SAME = ("gpu", "driver", "cuda", "torch", "python", "pycutfuse", "library", "fp32_precision")
"""What must be equal in two environments whose results stand in one file."""

Item = TypeVar("Item")


def check_same(old: Run, environment: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse to put results of another environment, or timed for another length, beside `old`'s.

    Raises
    ------
    ValueError
        Naming each difference.
    """
    differences = [
        f"{name} is {environment.get(name)}, there it is {old.environment.get(name)}"
        for name in SAME
        if environment.get(name) != old.environment.get(name)
    ]
    theirs, ours = old.settings.get("settings"), settings.get("settings")
    if theirs != ours:
        differences.append(f"slices are {ours}, there they are {theirs}")
    if differences:
        raise ValueError(
            f"results of different runs do not go into one file: {'; '.join(differences)}. "
            "--json starts a new one"
        )


def merge(old: Run, new: Run) -> Run:
    """`old` with what `new` measured: a result of the same name and tier is replaced.

    Raises
    ------
    ValueError
        As `check_same`.
    """
    check_same(old, new.environment, new.settings)
    measured = {sizes.name for sizes in new.sizes} | {
        case.name.split(".")[0] for case in new.forced
    }
    skipped = {name: why for name, why in old.skipped.items() if name not in measured}
    return replace(
        old,
        environment={**old.environment, "commit": _commits(old, new)},
        settings={**old.settings, **new.settings},
        cases=_joined(old.cases, new.cases, lambda item: (item.tier, item.name)),
        executor=_joined(old.executor, new.executor, lambda item: item.name),
        sizes=_joined(old.sizes, new.sizes, lambda item: (item.tier, item.name)),
        forced=_joined(old.forced, new.forced, lambda item: item.name),
        fuzz=_joined(old.fuzz, new.fuzz, lambda item: (item.family, item.seeds)),
        skipped={**skipped, **new.skipped},
        host=_joined(old.host, new.host, lambda item: item.module),
    )


def _joined(
    old: Sequence[Item], new: Sequence[Item], key: Callable[[Item], Hashable]
) -> list[Item]:
    found = {key(item): item for item in old}
    found.update((key(item), item) for item in new)
    return list(found.values())


def _commits(old: Run, new: Run) -> str | None:
    theirs, ours = old.environment.get("commit"), new.environment.get("commit")
    if not theirs or not ours:
        return theirs or ours
    return theirs if ours in theirs.split(", ") else f"{theirs}, {ours}"


def read_fuzz(path: str | Path, environment: dict[str, Any]) -> Fuzz:
    """Counts that ``python -m pycutfuse.testing.repro --json`` wrote.

    Raises
    ------
    ValueError, OSError
        If the file is none of these, or was made on another device or torch than `environment`.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        fuzz = Fuzz(
            family=data["job"]["family"],
            seeds=(int(data["seeds"][0]), int(data["seeds"][1])),
            device=data["device"],
            counts={name: int(count) for name, count in data["counts"].items()},
            handovers=int(data["handovers"]),
            fallbacks=int(data["fallbacks"]),
            mechanisms={name: int(count) for name, count in data.get("mechanisms", {}).items()},
        )
        torch = data["torch"]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path}: no counts of python -m pycutfuse.testing.repro --json ({error!r})"
        ) from error
    gpu = environment.get("gpu")
    if gpu is not None and (fuzz.device, torch) != (gpu, environment.get("torch")):
        raise ValueError(
            f"{path}: made on {fuzz.device} with torch {torch}, but the results are of {gpu} with "
            f"torch {environment.get('torch')}"
        )
    return fuzz
