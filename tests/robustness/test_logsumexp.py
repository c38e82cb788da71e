"""logsumexp keeps to its memory, gives the same bits again, and runs in graphs and on streams."""

import pytest
import torch

import pycutfuse as pcf
from pycutfuse.testing import LAYOUTS, generate, guarded, strided

from ..cases.logsumexp import EMPTY, KERNEL, PLAIN, VIEWS, ReduceCase

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("case", PLAIN + VIEWS + EMPTY + KERNEL, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_keeps_to_its_memory(case: ReduceCase, dtype, cuda: torch.device, fused: None) -> None:
    x = case.draw(seed=1, dtype=dtype).to(cuda)
    with guarded():
        result = pcf.ops.logsumexp(x, case.dims)
    expected = torch.logsumexp(x.double(), case.dims)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(700, 40), (7, 4096), (300, 1000), (2, 300001)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gaps_are_not_read(shape, dim: int, layout: str, dtype, cuda, fused: None) -> None:
    x = strided(generate("randn", shape, seed=2, device=cuda).to(dtype), layout)
    with guarded():
        result = pcf.ops.logsumexp(x, dim)
    expected = torch.logsumexp(x.double(), dim)
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", KERNEL, ids=str)
def test_the_same_bits_again(case: ReduceCase, cuda: torch.device, fused: None) -> None:
    x = case.view(torch.randn(case.shape, device=cuda))
    first = pcf.ops.logsumexp(x, case.dims)
    for _ in range(3):
        assert torch.equal(pcf.ops.logsumexp(x, case.dims), first)


@pytest.mark.parametrize(("shape", "dim"), [((300, 1000), 1), ((3, 500000), 1), ((500000, 3), 0)])
def test_cuda_graph(shape, dim: int, cuda: torch.device, fused: None) -> None:
    x = torch.randn(shape, device=cuda)
    pcf.ops.logsumexp(x, dim)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = pcf.ops.logsumexp(x, dim)
    for seed in range(3):
        x.copy_(generate("randn", shape, seed=seed))
        graph.replay()
        assert torch.equal(result, pcf.ops.logsumexp(x, dim))


def test_it_waits_for_what_wrote_its_input(cuda: torch.device, fused: None) -> None:
    """Launches overlap the kernel before them: its writes must be seen, and its reads be over."""
    for shape, dim in (((64, 100000), 1), ((100000, 64), 0), ((20000, 200), 1)):
        x = torch.zeros(shape, device=cuda)
        values = [torch.full(shape, float(step), device=cuda) for step in range(20)]
        results = []
        for value in values:
            x.copy_(value)
            results.append(pcf.ops.logsumexp(x, dim))
            results.append(pcf.ops.logsumexp(pcf.ops.logsumexp(x, dim), 0))
        for step, (one, whole) in enumerate(zip(results[::2], results[1::2], strict=True)):
            expected = torch.logsumexp(values[step].double(), dim)
            torch.testing.assert_close(one.double(), expected, rtol=1e-6, atol=1e-6)
            expected = torch.logsumexp(expected, 0)
            torch.testing.assert_close(whole.double(), expected, rtol=1e-6, atol=1e-6)


def test_streams(cuda: torch.device, fused: None) -> None:
    x = torch.randn(3, 500000, device=cuda)
    expected = pcf.ops.logsumexp(x, 1)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    found = []
    for step in range(40):
        with torch.cuda.stream(streams[step % 4]):
            found.append(pcf.ops.logsumexp(x, 1))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in found)


@pytest.mark.cuda(count=2)
def test_another_device(fused: None) -> None:
    x = torch.randn(3, 500000, device="cuda:1")
    torch.testing.assert_close(pcf.ops.logsumexp(x, 1), torch.logsumexp(x, 1))
    assert torch.cuda.current_device() == 0
