"""A model that ends in a fused logsumexp trains as its chain, eagerly, compiled and replayed."""

import copy

import pytest
import torch
from torch import Tensor, nn

import pycutfuse as pcf

CLOSE = {"rtol": 1e-3, "atol": 1e-4}
SIZES = (72, 80, 96)


def build(kind: str, device: torch.device) -> nn.Module:
    torch.manual_seed(4)
    if kind == "two":
        return pcf.nn.LinearSigmoidLinearLogSumExp(*SIZES, device=device)
    scale = nn.Parameter(torch.rand(SIZES[2], device=device))
    steps = (pcf.mul(scale), pcf.gelu())
    return pcf.nn.LinearLogSumExp(SIZES[0], SIZES[2], device=device, epilogue=steps)


def batches(device: torch.device, count: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(20, SIZES[0], generator=generator).to(device) for _ in range(count)]


def train(model: nn.Module, device: torch.device, step=None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for x in batches(device):
        optimizer.zero_grad()
        loss = (model if step is None else step)(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("kind", ["one", "two"])
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_losses_and_parameters(kind: str, backend: str | None, device: torch.device) -> None:
    torch._dynamo.reset()
    model = build(kind, device)
    twin = copy.deepcopy(model.to_torch())
    step = None if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(train(model, device, step), train(twin, device), **CLOSE)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("kind", ["one", "two"])
def test_checkpointed(kind: str, device: torch.device) -> None:
    model, x = build(kind, device), batches(device, 1)[0].requires_grad_()
    expected = torch.autograd.grad(model.to_torch()(x).sum(), x)[0]
    result = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), x)[0], expected, **CLOSE)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dynamic_sizes(backend: str, device: torch.device) -> None:
    torch._dynamo.reset()
    model = build("two", device)
    twin = model.to_torch()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    parameters = list(model.parameters())
    for rows in (16, 19, 5):
        x = torch.randn(rows, SIZES[0], device=device, requires_grad=True)
        one = torch.autograd.grad(compiled(x).square().sum(), [x, *parameters])
        other = torch.autograd.grad(twin(x).square().sum(), [x, *parameters])
        for ours, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)
    assert counter.frame_count == 1


def test_export(device: torch.device) -> None:
    model, x = build("two", device).eval(), batches(device, 1)[0]
    for strict in (True, False):
        exported = torch.export.export(model, (x,), strict=strict)
        assert "pycutfuse.linear_linear_logsumexp" in str(exported)
        torch.testing.assert_close(exported.module()(x), model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["one", "two"])
def test_autocast_as_torch(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    model, x = build(kind, device), batches(device, 1)[0]
    with torch.autocast(device.type, dtype):
        result, expected = model(x), model.to_torch()(x)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    assert "autocast" in " ".join(pcf.counters()["fallback"])


@pytest.mark.parametrize("wanted", range(1, 32))
def test_only_wanted_gradients(wanted: int, device: torch.device) -> None:
    model, x = build("two", device), batches(device, 1)[0]
    twin, y = copy.deepcopy(model.to_torch()), x.clone()
    for inputs in ((x, *model.parameters()), (y, *twin.parameters())):
        for at, tensor in enumerate(inputs):
            tensor.requires_grad_(bool(wanted >> at & 1))
    model(x).square().sum().backward()
    twin(y).square().sum().backward()
    for one, other in zip((x, *model.parameters()), (y, *twin.parameters()), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, **CLOSE)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["one", "two"])
def test_whole_step_in_a_cuda_graph(kind: str, cuda: torch.device, fused: None) -> None:
    model = build(kind, cuda)
    twin = copy.deepcopy(model.to_torch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    other = torch.optim.SGD(twin.parameters(), lr=0.05)
    x = batches(cuda, 1)[0].clone()
    state = copy.deepcopy(model.state_dict())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    model.load_state_dict(state)
    for given in batches(cuda):
        x.copy_(given)
        graph.replay()
        other.zero_grad()
        expected = twin(given).square().mean()
        expected.backward()
        other.step()
        torch.testing.assert_close(loss, expected, **CLOSE)
