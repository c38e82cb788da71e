"""PNG bar chart of a run. matplotlib is imported only here."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycutfuse.bench.report import by_tier
from pycutfuse.bench.results import VARIANTS, CaseResult, Run
from pycutfuse.bench.tables import tier_title

COLOURS = dict(
    zip(VARIANTS, ("#9aa0a6", "#c9cdd2", "#5b7fa6", "#8fb0d3", "#d1495b", "#edae49"), strict=True)
)


class PlotError(Exception):
    """Why no chart can be drawn, in one line."""


def bars(cases: Sequence[CaseResult]) -> dict[str, list[float]]:
    """Median in ms of each variant for each timed case, NaN where it was not timed.

    Variants that no case has are left out; the order of cases is that of `timed`.
    """
    found = {}
    for name in VARIANTS:
        seconds = [case.seconds(name) for case in timed(cases)]
        if any(value is not None for value in seconds):
            found[name] = [math.nan if s is None else s * 1e3 for s in seconds]
    return found


def timed(cases: Sequence[CaseResult]) -> list[CaseResult]:
    """Cases that have a bar."""
    return [case for case in cases if case.timings]


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
    """Write the chart: for each tier and case a group of bars, relative to the fastest PyTorch.

    Raises
    ------
    PlotError
        If matplotlib is missing, nothing was timed, or the file cannot be written.
    """
    pyplot = require()
    tiers = {tier: timed(cases) for tier, cases in by_tier(run).items() if timed(cases)}
    if not tiers:
        raise PlotError("--plot: nothing was timed, so there is nothing to draw")
    heights = [0.6 + 1.1 * len(cases) for cases in tiers.values()]
    figure, grid = pyplot.subplots(
        len(tiers),
        figsize=(10, 1.0 + sum(heights)),
        layout="constrained",
        squeeze=False,
        height_ratios=heights,
    )
    handles: dict[str, Any] = {}
    for axes, (tier, cases) in zip(grid[:, 0], tiers.items(), strict=True):
        handles.update(_panel(axes, cases))
        axes.set_title(tier_title(tier), fontsize=9)
    grid[-1, 0].set_xlabel("median time over that of the fastest PyTorch at the same dtype, flags")
    title = f"pycutfuse beside PyTorch {run.environment['torch']}, {run.environment['gpu']}"
    figure.suptitle(title, fontsize=10)
    named = [name for name in VARIANTS if name in handles]
    figure.legend(
        [handles[name] for name in named],
        named,
        loc="outside lower center",
        ncols=len(named),
        fontsize=8,
    )
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise PlotError(f"--plot {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _panel(axes: Any, cases: Sequence[CaseResult]) -> dict[str, Any]:
    """Draw one tier; returns its bars by variant, for the legend."""
    groups = bars(cases)
    best = [case.baseline[1] * 1e3 if case.baseline else math.nan for case in cases]
    height = 0.8 / len(groups)
    handles = {}
    for number, (variant, values) in enumerate(groups.items()):
        places = [index + number * height for index in range(len(cases))]
        relative = [value / base for value, base in zip(values, best, strict=True)]
        handles[variant] = axes.barh(places, relative, height, color=COLOURS[variant])
        labels = [
            "" if math.isnan(value) else f"{value:.4g} ms{_ratio(case.speedup(variant), variant)}"
            for case, value in zip(cases, values, strict=True)
        ]
        axes.bar_label(handles[variant], labels, padding=3, fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.5)
    names = [case.name for case in cases]
    axes.set_yticks([index + 0.4 - height / 2 for index in range(len(cases))], names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    return handles


def _ratio(value: float | None, variant: str) -> str:
    return f", {value:.2f}x" if value is not None and variant.startswith("pycutfuse") else ""
