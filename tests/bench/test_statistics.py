"""Medians and percentiles are those of the samples."""

import random

import pytest

from pycutfuse.bench.statistics import geometric_mean, percentile, summarise


def test_percentiles_of_a_known_sequence_in_any_order():
    samples = [float(i) for i in range(101)]
    random.Random(0).shuffle(samples)
    summary = summarise(samples)
    assert (summary.median, summary.p20, summary.p80, summary.count) == (50.0, 20.0, 80.0, 101)


def test_percentile_interpolates_between_ranks():
    assert percentile([0.0, 10.0], 20) == pytest.approx(2.0)
    assert percentile([3.0], 80) == 3.0


def test_one_outlier_does_not_move_the_median():
    assert summarise([1.0] * 9 + [1000.0]).median == 1.0


@pytest.mark.parametrize(("samples", "q"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentile_refuses_what_has_no_answer(samples, q):
    with pytest.raises(ValueError, match="percentile"):
        percentile(samples, q)


def test_geometric_mean_weighs_twice_as_fast_and_twice_as_slow_alike():
    assert geometric_mean([2.0, 0.5, 1.0]) == pytest.approx(1.0)
    assert geometric_mean([3.0]) == pytest.approx(3.0)


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [-1.0]])
def test_geometric_mean_refuses_what_has_none(values):
    with pytest.raises(ValueError, match="geometric mean"):
        geometric_mean(values)
