"""Layers that are turned over: fp32 weights, rounded on their way, and those of 16 bits."""

import pytest
import torch

import pycutfuse as pcf
from pycutfuse.testing import DISTRIBUTIONS, floor_of, generate, no_worse

from ..cases import turned
from ..cases.moments import OFFSETS
from .common import compare, exact_linear, torch_linear

pytestmark = pytest.mark.cuda
NARROW = pytest.mark.parametrize("dtype", turned.NARROW, ids=str)


@pytest.mark.parametrize("size", [*turned.SIZES, (1100, 3000, 200), (64, 20000, 64)], ids=str)
def test_whole_numbers(size: tuple[int, int, int], fused: None) -> None:
    turned.check_whole_numbers(size, "cuda")


def test_others_are_straight(fused: None) -> None:
    turned.check_others_are_straight("cuda")


def test_ranges(fused: None) -> None:
    turned.check_ranges("cuda")


def test_not_finite(fused: None) -> None:
    turned.check_not_finite("cuda")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("factor", [1.0, 2.0**14])
def test_batch_norm(training: bool, factor: float, fused: None) -> None:
    turned.check_batch_norm(training, factor, "cuda")


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("size", [(1024, 2048, 8192), (128, 4096, 1000), (300, 500, 64)], ids=str)
def test_errors_are_no_worse_than_pytorchs(size, distribution, fused: None) -> None:
    m, n, k = size
    x = generate(distribution, (m, k), seed=1, device="cuda")
    weight = generate(distribution, (n, k), seed=2, device="cuda")
    theirs = torch_linear(x, weight, "tf32")
    pair = compare(turned.linear(x, weight), theirs, *exact_linear(x, weight))
    assert no_worse(*pair, floor=floor_of(torch.float32, "tf32")) is None


@NARROW
@pytest.mark.parametrize("raster", [0, 1])
@pytest.mark.parametrize(
    "size", [*turned.NARROW_SIZES, (1100, 3000, 200), (64, 20000, 64)], ids=str
)
def test_narrow(dtype: torch.dtype, size: tuple[int, int, int], raster: int, fused: None) -> None:
    turned.check_narrow(size, raster, "cuda", dtype)


@NARROW
def test_narrow_that_is_not_finite(dtype: torch.dtype, fused: None) -> None:
    turned.check_not_finite("cuda", dtype)


@NARROW
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("factor", [1.0, 2.0**14])
def test_narrow_batch_norm(dtype: torch.dtype, training: bool, factor: float, fused: None) -> None:
    turned.check_batch_norm(training, factor, "cuda", dtype)


@NARROW
@pytest.mark.parametrize(
    "size", [*turned.NARROW_SIZES, (130, 77, 64), (1100, 3000, 200), (64, 20000, 64)], ids=str
)
def test_narrow_logsumexp(dtype: torch.dtype, size: tuple[int, int, int], fused: None) -> None:
    turned.check_logsumexp(size, "cuda", dtype)


@NARROW
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("m", [300, 1000, 5003])
def test_narrow_moments(m: int, offset: float, dtype: torch.dtype, fused: None) -> None:
    turned.check_moments(m, offset, "cuda", dtype)


def test_what_is_turned_says_so(fused: None) -> None:
    x, weight = (torch.ones(s, 8192, device="cuda") for s in (512, 8192))
    text = str(pcf.explain(pcf.ops.linear, x, weight, precision="tf32"))
    assert ("turned over" in text) == (torch.cuda.get_device_capability() == (9, 0))
