"""Derivatives of derivatives: a second one is refused wherever it is asked for, never left out."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pycutfuse._library import _level_of

from ..cases.modules import MODULES, input_of


@pytest.fixture(params=MODULES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[True, False])
def call(
    request: pytest.FixtureRequest, name: str, device: torch.device
) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    layer = MODULES[name]().to(device).train(request.param)
    return layer, input_of(name, 5).to(device).requires_grad_()


def penalty(layer: nn.Module, x: Tensor) -> Tensor:
    """A loss and the norm of its gradient, which depends on the parameters as well."""
    loss = layer(x).square().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.square().sum()


def test_a_second_derivative_is_refused(call: tuple[nn.Module, Tensor]) -> None:
    layer, x = call
    named = next(layer.parameters())
    for differentiate in (
        lambda loss: torch.autograd.grad(loss, named),
        lambda loss: loss.backward(inputs=[named]),
        lambda loss: torch.autograd.grad(loss, x),
        lambda loss: loss.backward(),
    ):
        with pytest.raises(RuntimeError, match=r"once differentiable.*to_torch"):
            differentiate(penalty(layer, x))


def test_a_graph_of_gradients_that_nobody_differentiates(call: tuple[nn.Module, Tensor]) -> None:
    layer, x = call
    (plain,) = torch.autograd.grad(layer(x).square().sum(), x)
    for run in (layer, lambda value: checkpoint(layer, value, use_reentrant=False)):
        (grad,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        assert grad.requires_grad
        torch.testing.assert_close(grad.detach(), plain)


def test_vmap_of_a_backward(call: tuple[nn.Module, Tensor]) -> None:
    layer, x = call
    inputs = [x, *layer.parameters()]
    seeds = torch.randn(3, *layer(x).shape, device=x.device)

    def gradients(y: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, inputs, seed, retain_graph=True)

    y = layer(x)
    found = torch.vmap(lambda seed: gradients(y, seed))(seeds)
    for at, seed in enumerate(seeds):
        for one, expected in zip(found, gradients(y, seed), strict=True):
            torch.testing.assert_close(one[at], expected)


def test_a_batch_of_gradients(call: tuple[nn.Module, Tensor]) -> None:
    layer, x = call
    inputs = [x, *layer.parameters()]
    y = layer(x)
    seeds = torch.randn(3, *y.shape, device=x.device)
    found = torch.autograd.grad(y, inputs, seeds, retain_graph=True, is_grads_batched=True)
    for at, seed in enumerate(seeds):
        expected = torch.autograd.grad(y, inputs, seed, retain_graph=True)
        for batch, one in zip(found, expected, strict=True):
            torch.testing.assert_close(batch[at], one)


@pytest.mark.parametrize("level", [1, 3])
def test_a_batch_in_a_thread_that_counts_no_levels(level: int) -> None:
    """As those in which gradients of CUDA tensors are computed."""
    grad = torch._add_batch_dim(torch.randn(3, 2, 4), 0, level)
    assert _level_of(grad) == level
    with pytest.raises(RuntimeError, match="first argument alone"):
        _level_of(torch.ones(3, 2))


def test_a_vectorised_jacobian(call: tuple[nn.Module, Tensor]) -> None:
    layer, x = call
    found, expected = (
        torch.autograd.functional.jacobian(layer, x, vectorize=one) for one in (True, False)
    )
    torch.testing.assert_close(found, expected)
