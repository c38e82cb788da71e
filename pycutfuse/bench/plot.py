"""PNG bar chart of a run. matplotlib is imported only here."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

from pycutfuse.bench.results import VARIANTS, Run

COLOURS = dict(
    zip(VARIANTS, ("#9aa0a6", "#c9cdd2", "#5b7fa6", "#8fb0d3", "#d1495b", "#edae49"), strict=True)
)


class PlotError(Exception):
    """Why no chart can be drawn, in one line."""


def bars(run: Run) -> dict[str, list[float]]:
    """Median in ms of each variant for each timed case, NaN where it was not timed.

    Variants that no case has are left out; the order of cases is that of `timed_cases`.
    """
    found = {}
    for name in VARIANTS:
        seconds = [case.seconds(name) for case in run.cases if case.timings]
        if any(value is not None for value in seconds):
            found[name] = [math.nan if s is None else s * 1e3 for s in seconds]
    return found


def timed_cases(run: Run) -> list[str]:
    """Names of the cases that have a bar."""
    return [case.name for case in run.cases if case.timings]


def require() -> Any:
    """Give matplotlib.pyplot, drawing to files only.

    Raises
    ------
    PlotError
        If matplotlib is not installed.
    """
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise PlotError(
            f"--plot needs matplotlib ({error}): pip install matplotlib, or pycutfuse[bench]"
        ) from error


def draw(run: Run, path: str | Path) -> None:
    """Write the chart: a group of bars for each case, relative to the fastest PyTorch there.

    Raises
    ------
    PlotError
        If matplotlib is missing, nothing was timed, or the file cannot be written.
    """
    pyplot = require()
    groups, names = bars(run), timed_cases(run)
    if not names:
        raise PlotError("--plot: nothing was timed, so there is nothing to draw")
    cases = [case for case in run.cases if case.timings]
    best = [case.baseline[1] * 1e3 if case.baseline else math.nan for case in cases]
    height = 0.8 / len(groups)
    figure, axes = pyplot.subplots(figsize=(10, 1.6 + 1.1 * len(names)), layout="constrained")
    for number, (variant, values) in enumerate(groups.items()):
        places = [index + number * height for index in range(len(names))]
        relative = [value / base for value, base in zip(values, best, strict=True)]
        drawn = axes.barh(places, relative, height, label=variant, color=COLOURS[variant])
        labels = [
            "" if math.isnan(value) else f"{value:.4g} ms{_ratio(case.speedup(variant), variant)}"
            for case, value in zip(cases, values, strict=True)
        ]
        axes.bar_label(drawn, labels, padding=3, fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.5)
    axes.set_yticks([index + 0.4 - height / 2 for index in range(len(names))], names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("median time over that of the fastest PyTorch at default flags")
    title = f"pycutfuse ({run.tier}) beside PyTorch {run.environment['torch']}"
    axes.set_title(f"{title}, {run.environment['gpu']}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(groups), fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise PlotError(f"--plot {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _ratio(value: float | None, variant: str) -> str:
    return f", {value:.2f}x" if value is not None and variant.startswith("pycutfuse") else ""
