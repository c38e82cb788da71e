"""logsumexp is never less accurate than PyTorch's, measured against float64."""

import pytest
import torch
from torch import Tensor

import pycutfuse as pcf
from pycutfuse._loader import native
from pycutfuse.support import device_props
from pycutfuse.testing import DISTRIBUTIONS, IEEE_FLOOR, generate, kinds, no_worse

from ..cases.logsumexp import KERNEL, ReduceCase
from .common import compare

pytestmark = pytest.mark.cuda

INF, NAN = float("inf"), float("nan")
FLOORS = {torch.float32: IEEE_FLOOR, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def check(x: Tensor, dims, result: Tensor) -> None:
    exact = torch.logsumexp(x.double(), dims)
    pair = compare(result, torch.logsumexp(x, dims), exact)
    problem = no_worse(*pair, floor=FLOORS[x.dtype])
    assert problem is None, problem


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", list(FLOORS))
@pytest.mark.parametrize("shape", [(4096, 100), (2048, 1024), (300, 40000), (2, 3000000)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_error(distribution: str, dtype, shape, dim: int, cuda: torch.device, fused: None) -> None:
    x = generate(distribution, shape, seed=1, device=cuda).to(dtype)
    if dim == 0:
        x = x.t().contiguous()
    check(x, dim, pcf.ops.logsumexp(x, dim))
    check(x.t(), 1 - dim, pcf.ops.logsumexp(x.t(), 1 - dim))


@pytest.mark.parametrize("case", KERNEL, ids=str)
@pytest.mark.parametrize("dtype", list(FLOORS))
def test_every_reading(case: ReduceCase, dtype, cuda: torch.device, fused: None) -> None:
    generator = torch.Generator(cuda).manual_seed(2)
    x = case.view(torch.randn(case.shape, device=cuda, generator=generator).to(dtype))
    check(x, case.dims, pcf.ops.logsumexp(x, case.dims))


@pytest.mark.parametrize("offset", [-300.0, -6.0, 80.0, 1e4, 1e30])
def test_shifted_values(offset: float, cuda: torch.device, fused: None) -> None:
    """-6 brings results near 1, where sums of exponentials near 1 cancel against the maximum."""
    x = generate("randn", (1000, 1000), seed=3, device=cuda) + offset
    for dim in (0, 1):
        check(x, dim, pcf.ops.logsumexp(x, dim))


@pytest.mark.parametrize("shape", [(64, 30), (64, 3000), (3, 500000)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_non_finite_elements(shape, dim: int, value: float, cuda, fused: None) -> None:
    x = generate("randn", shape, seed=4, device=cuda)
    at = torch.randint(x.numel(), (9,), generator=torch.Generator().manual_seed(5))
    x.view(-1)[at.to(cuda)] = value
    x[0] = -INF
    x[:, 1] = -INF
    ours, theirs = pcf.ops.logsumexp(x, dim), torch.logsumexp(x, dim)
    assert torch.equal(kinds(ours), kinds(theirs))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


def merge(partials: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    rows, count = partials.shape[:2]
    out = torch.full((rows,), NAN, device=partials.device, dtype=dtype)
    code = list(FLOORS).index(dtype)
    index = partials.get_device()
    stream = torch.cuda.current_stream().cuda_stream
    arguments = (partials.data_ptr(), rows, count, out.data_ptr(), code)
    native().binding.merge_logsumexp_partials(*arguments, device_props(index), stream)
    return out


@pytest.mark.parametrize("count", [0, 1, 7, 8, 33, 64, 65, 1000, 1025, 5000])
@pytest.mark.parametrize("rows", [1, 33, 1000])
@pytest.mark.parametrize("dtype", list(FLOORS))
def test_merge_of_partials(count: int, rows: int, dtype, cuda: torch.device) -> None:
    largest = generate("randn", (rows, count), seed=6, device=cuda) * 20
    total = generate("rand", (rows, count), seed=7, device=cuda) * 100 + 1
    largest[:, 2::5], total[:, 2::5] = -INF, 0.0
    exact = torch.logsumexp(largest.double() + total.double().log(), 1)
    result = merge(torch.stack((largest, total), -1).contiguous(), dtype)
    torch.testing.assert_close(result.double(), exact, rtol=2 * FLOORS[dtype], atol=16 * 2**-24)


def test_merge_of_special_partials(cuda: torch.device) -> None:
    rows = [
        ([(-INF, 0.0), (-INF, 0.0)], -INF),
        ([(INF, INF), (5.0, 2.0)], INF),
        ([(5.0, NAN), (INF, INF)], NAN),
        ([(NAN, 1.0), (5.0, 2.0)], NAN),
        ([(-INF, NAN), (-INF, 0.0)], NAN),
        ([(3e38, 1.0), (-3e38, 1.0)], 3e38),
    ]
    partials = torch.tensor([row for row, _ in rows], device=cuda)
    expected = torch.tensor([value for _, value in rows], device=cuda)
    for wider in (1, 40, 900):
        found = merge(partials.repeat(1, wider, 1))
        finite = expected.isfinite()
        assert torch.equal(kinds(found), kinds(expected))
        torch.testing.assert_close(found[finite], expected[finite])


def test_more_than_2_to_the_31_elements(cuda: torch.device, fused: None) -> None:
    rows, length = 2**16 + 3, 2**15
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * 2 * rows * length:
        pytest.skip(f"needs a GPU with {3 * 2 * rows * length >> 30} GiB free")
    x = torch.zeros(rows, length, device=cuda, dtype=torch.bfloat16)
    x[-1, -1], x[-2, 0] = 50.0, 60.0
    result = pcf.ops.logsumexp(x, 1)
    assert (float(result[-1]), float(result[-2])) == (50.0, 60.0)
    torch.testing.assert_close(result[:-2], torch.full_like(result[:-2], 15 * 0.6931472))
    result = pcf.ops.logsumexp(x, 0)
    assert (float(result[-1]), float(result[0])) == (50.0, 60.0)
    assert float(pcf.ops.logsumexp(x, (0, 1))) == 60.0
