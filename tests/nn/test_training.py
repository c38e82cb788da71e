"""A training loop goes as with the chain, eagerly, compiled and replayed."""

import copy

import pytest
import torch
from torch import Tensor, nn

import pycutfuse as pcf


def build(device: torch.device) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(
        pcf.nn.Linear(12, 16, epilogue=(pcf.gelu(),), device=device),
        pcf.nn.LinearScaleBatchNorm1d(16, 8, (8,), device=device, epilogue=(pcf.relu(),)),
        pcf.nn.Linear(8, 3, device=device),
    )


def plain(model: nn.Module) -> nn.Module:
    return copy.deepcopy(nn.Sequential(*(layer.to_torch() for layer in model)))


def batches(device: torch.device, count: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [
        (
            torch.randn(20, 12, generator=generator).to(device),
            torch.randn(20, 3, generator=generator).to(device),
        )
        for _ in range(count)
    ]


def train(model: nn.Module, device: torch.device, step=None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for x, y in batches(device):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x) if step is None else step(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def test_losses_and_statistics(device: torch.device) -> None:
    model = build(device)
    twin = plain(model)
    torch.testing.assert_close(train(model, device), train(twin, device), rtol=1e-4, atol=1e-5)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert int(model[1].bn.num_batches_tracked) == 6
    torch.testing.assert_close(
        model[1].bn.running_var, twin[1].bn.running_var, rtol=1e-3, atol=1e-5
    )


def test_compiled(device: torch.device) -> None:
    torch._dynamo.reset()
    model = build(device)
    twin = plain(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        train(model, device, compiled), train(twin, device), rtol=1e-4, atol=1e-5
    )
    assert int(model[1].bn.num_batches_tracked) == 6


def test_checkpointed(device: torch.device) -> None:
    model = build(device)
    x = torch.randn(20, 12, device=device, requires_grad=True)
    expected = torch.autograd.grad(plain(model)(x).sum(), x)[0]
    result = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    torch.testing.assert_close(
        torch.autograd.grad(result.sum(), x)[0], expected, rtol=1e-3, atol=1e-5
    )


@pytest.mark.cuda
def test_whole_step_in_a_cuda_graph(cuda: torch.device) -> None:
    model = build(cuda)
    twin = plain(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    other = torch.optim.SGD(twin.parameters(), lr=0.05)
    x, y = (tensor.clone() for tensor in batches(cuda, 1)[0])
    state = copy.deepcopy(model.state_dict())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    model.load_state_dict(state)
    for given, wanted in batches(cuda):
        x.copy_(given)
        y.copy_(wanted)
        graph.replay()
        other.zero_grad()
        expected = nn.functional.mse_loss(twin(given), wanted)
        expected.backward()
        other.step()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    assert int(model[1].bn.num_batches_tracked) == 6
