"""Order statistics of timing samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(samples: Sequence[float], q: float) -> float:
    """Percentile with linear interpolation between the closest ranks.

    Parameters
    ----------
    samples : sequence of float
        At least one sample, in any order.
    q : float
        Between 0 and 100.

    Raises
    ------
    ValueError
        If there is no sample or `q` is out of range.

    Examples
    --------
    >>> percentile([4.0, 1.0, 3.0, 2.0], 50)
    2.5
    """
    if not samples:
        raise ValueError("percentile of 0 samples; at least 1 is needed")
    if not 0 <= q <= 100:
        raise ValueError(f"percentile {q} is not between 0 and 100")
    ordered = sorted(samples)
    rank = (len(ordered) - 1) * q / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers, of which there is at least one.

    Raises
    ------
    ValueError
        If there is none, or one is not positive.

    Examples
    --------
    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    if not values:
        raise ValueError("geometric mean of 0 values; at least 1 is needed")
    if min(values) <= 0:
        raise ValueError(f"geometric mean of {min(values)}; positive numbers are needed")
    return math.exp(sum(math.log(value) for value in values) / len(values))


@dataclass(frozen=True)
class Summary:
    """Median, 20th and 80th percentile of `count` samples, in seconds."""

    median: float
    p20: float
    p80: float
    count: int


def summarise(samples: Sequence[float]) -> Summary:
    """Summary of timing samples.

    Examples
    --------
    >>> summarise([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    Summary(median=3.5, p20=2.0, p80=5.0, count=6)
    """
    return Summary(
        median=percentile(samples, 50),
        p20=percentile(samples, 20),
        p80=percentile(samples, 80),
        count=len(samples),
    )
