"""The measures and generators themselves."""

import pytest
import torch

from pycutfuse.testing import (
    DISTRIBUTIONS,
    IEEE_FLOOR,
    ErrorPair,
    errors,
    generate,
    integers,
    kinds,
    no_worse,
)

from .common import exact_linear


def test_relative_errors() -> None:
    exact = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    found = errors(torch.tensor([[3.0, 4.5]]), exact, torch.tensor([[6.0, 8.0]]).double())
    assert found == ErrorPair(0.5 / 5.0, 0.5 / 8.0)


def test_a_nan_is_an_error_of_any_size() -> None:
    exact = torch.ones(2, dtype=torch.float64)
    found = errors(torch.tensor([1.0, float("nan")]), exact, exact)
    assert no_worse(found, ErrorPair(1.0, 1.0)) is not None


@pytest.mark.parametrize(
    ("ours", "theirs", "passes"),
    [
        (IEEE_FLOOR, 0.0, True),
        (IEEE_FLOOR * 1.01, 0.0, False),
        (1e-6, 1e-6, True),
        (1.01e-6, 1e-6, False),
    ],
)
def test_the_rule(ours: float, theirs: float, passes: bool) -> None:
    for pair in (ErrorPair(ours, 0.0), ErrorPair(0.0, ours)):
        assert (no_worse(pair, ErrorPair(theirs, theirs)) is None) == passes


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_data_is_seeded(distribution: str) -> None:
    one, other = (generate(distribution, (50, 3), seed=4) for _ in range(2))
    assert torch.equal(one, other)
    assert not torch.equal(one, generate(distribution, (50, 3), seed=5))
    assert (one.min() >= 0) == (distribution != "randn")


def test_integers_are_whole_and_bounded() -> None:
    value = integers((1000,), seed=1, limit=2)
    assert set(value.tolist()) == {-2.0, -1.0, 0.0, 1.0, 2.0}


def test_exact_values_and_kinds() -> None:
    exact, bound = exact_linear(torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 4.0]]))
    assert (exact.item(), bound.item()) == (-5.0, 11.0)
    inf = float("inf")
    assert kinds(torch.tensor([1.0, float("nan"), inf, -inf])).tolist() == [0, 1, 2, 3]
