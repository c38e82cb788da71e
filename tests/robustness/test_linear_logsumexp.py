"""Linear layers under logsumexp keep to their memory, repeat bitwise, run in graphs and streams."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pycutfuse as pcf
from pycutfuse.testing import LAYOUTS, generate, guarded, strided

from ..cases.sizes import KERNEL, SizeCase

pytestmark = pytest.mark.cuda

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHAINS = [(256, 256, 256, 256), (1, 64, 72, 1), (333, 129, 517, 65), (130, 1000, 200, 10)]


def close(result: Tensor, exact: Tensor) -> None:
    tolerance = max(4 * torch.finfo(result.dtype).eps, 1e-4)
    torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)


def model(sizes, cuda: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return pcf.nn.LinearSigmoidLinearLogSumExp(*sizes, device=cuda, dtype=dtype)


@pytest.fixture(autouse=True)
def ieee():
    with pcf.precision("ieee"):
        yield


@pytest.mark.parametrize("size", KERNEL, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_layer_keeps_to_its_memory(
    size: SizeCase, layout: str, dtype: torch.dtype, cuda: torch.device, fused: None
) -> None:
    x = generate("randn", (size.m, size.k), seed=1, device=cuda).to(dtype)
    weight = (generate("randn", (size.n, size.k), seed=2, device=cuda) / size.k**0.5).to(dtype)
    full = generate("randn", (size.m, size.n), seed=4, device=cuda).to(dtype)
    x, weight, full = (strided(tensor, layout) for tensor in (x, weight, full))
    with guarded():
        result = pcf.ops.linear_logsumexp(x, weight, epilogue=(pcf.tanh(), pcf.add(full)))
    logits = torch.tanh(F.linear(x.double(), weight.double())) + full.double()
    close(result, torch.logsumexp(logits, 1))


@pytest.mark.parametrize("size", CHAINS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_layers_keep_to_their_memory(
    size, layout: str, dtype: torch.dtype, cuda: torch.device, fused: None
) -> None:
    layer = model(size[1:], cuda, dtype)
    wide = layer.to_torch()
    x = strided(generate("rand", size[:2], seed=1, device=cuda).to(dtype), layout)
    with torch.no_grad():
        for child in (layer.linear1, layer.linear2):
            child.weight.data = strided(child.weight.data, layout)
        with guarded():
            result = layer(x)
        exact = wide.double()(x.double())
    close(result, exact)


@pytest.mark.parametrize("size", CHAINS, ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_the_same_bits_again(size, frozen: bool, cuda: torch.device, fused: None) -> None:
    layer = model(size[1:], cuda).eval()
    if frozen:
        pcf.freeze(layer)
    x = generate("randn", size[:2], seed=1, device=cuda)
    with torch.no_grad():
        first = layer(x)
        assert all(torch.equal(layer(x), first) for _ in range(5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_graphs_with_gradients(dtype: torch.dtype, cuda: torch.device, fused: None) -> None:
    layer = model((129, 517, 65), cuda, dtype)
    x = generate("randn", (333, 129), seed=1, device=cuda).to(dtype).requires_grad_()
    inputs = [x, *layer.parameters()]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            torch.autograd.grad(layer(x).sum(), inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = layer(x)
        grads = torch.autograd.grad(result.sum(), inputs)
    for seed in range(3):
        with torch.no_grad():
            x.copy_(generate("randn", (333, 129), seed=seed))
        graph.replay()
        expected = layer(x)
        assert torch.equal(result, expected)
        for one, other in zip(grads, torch.autograd.grad(expected.sum(), inputs), strict=True):
            torch.testing.assert_close(one, other)


def test_streams(cuda: torch.device, fused: None) -> None:
    layer = model((1000, 512, 300), cuda)
    x = generate("randn", (700, 1000), seed=1, device=cuda)
    with torch.no_grad():
        expected = layer(x)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(4)]
        found = []
        for step in range(40):
            with torch.cuda.stream(streams[step % 4]):
                found.append(layer(x))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in found)


@pytest.mark.cuda(count=2)
def test_another_device(fused: None) -> None:
    layer = model((200, 128, 96), torch.device("cuda:1"))
    x = torch.randn(33, 200, device="cuda:1")
    with torch.no_grad():
        close(layer(x), layer.to_torch().double()(x.double()))
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("kind", ["one", "two"])
def test_logits_are_not_stored(kind: str, cuda: torch.device, fused: None) -> None:
    rows, features = 4096, 16384
    x = generate("randn", (rows, 64), seed=1, device=cuda)
    layer = pcf.nn.LinearLogSumExp(64, features, device=cuda)
    if kind == "two":
        layer = model((64, 64, features), cuda)
    with torch.no_grad():
        layer(x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer(x)
    assert torch.cuda.max_memory_allocated() - before < 4 * rows * features / 4
