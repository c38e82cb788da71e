"""The fuzzer's own float64 convolution is torch's, with its gradients, and definite at borders."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pycutfuse.testing.repro.taps import Differentiable, Taps


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def by_torch(x: Tensor, weight: Tensor, taps: Taps, extra: tuple[int, int]) -> Tensor:
    if taps.transposed:
        rest = taps.stride, taps.padding, extra, taps.groups, taps.dilation
        return F.conv_transpose2d(x, weight, None, *rest)
    return F.conv2d(x, weight, None, taps.stride, taps.padding, taps.dilation, taps.groups)


@pytest.fixture(autouse=True)
def one_thread():
    """Small problems: threads would only wait for each other."""
    outer = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(outer)


@pytest.mark.parametrize("transposed", [False, True])
def test_values_and_gradients_are_torchs(transposed: bool) -> None:
    rng = random.Random(3)
    torch.manual_seed(3)
    pair = lambda low, high: (rng.randint(low, high), rng.randint(low, high))  # noqa: E731
    for _ in range(60):
        groups, kernel = rng.choice((1, 1, 2, 3)), pair(1, 4)
        taps = Taps(kernel, pair(1, 4), pair(0, 3), pair(1, 3), groups, transposed)
        inner, outer = rng.randint(1, 4), rng.randint(1, 4)
        first, second = (inner, outer) if transposed else (outer, inner)
        x = drawn(rng.randint(0, 3), groups * inner, rng.randint(10, 12), rng.randint(10, 13))
        weight = drawn(groups * first, second, *kernel)
        extra = min(taps.stride[0], taps.dilation[0]) - 1, 0
        expected = by_torch(x, weight, taps, extra)
        result = Differentiable.apply(x, weight, taps, tuple(expected.shape[2:]))
        torch.testing.assert_close(result, expected)
        grad = torch.randn_like(expected)
        pairs = [torch.autograd.grad(one, (x, weight), grad) for one in (result, expected)]
        torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("transposed", [False, True])
def test_leading_dimensions_are_taken_one_by_one(transposed: bool) -> None:
    taps = Taps((3, 2), (2, 1), (1, 1), (1, 2), 2, transposed)
    x, weight = drawn(3, 2, 4, 7, 8), drawn(3, 4, 2, 3, 2)
    expected = [by_torch(*one, taps, (0, 0)) for one in zip(x, weight, strict=True)]
    size = tuple(expected[0].shape[2:])
    torch.testing.assert_close(taps.forward(x, weight, size), torch.stack(expected))


@pytest.mark.parametrize("transposed", [False, True])
def test_an_infinite_weight_does_not_meet_the_padding(transposed: bool) -> None:
    taps = Taps((3, 3), (1, 1), (1, 1), (1, 1), 1, transposed)
    x, weight = torch.ones(1, 1, 4, 4, dtype=torch.float64), torch.ones(1, 1, 3, 3).double()
    weight[0, 0, 0, 0] = float("inf")
    result = taps.forward(x, weight, (4, 4))
    assert not bool(result.isnan().any())
    assert int(result.isinf().sum()) == 9
