"""What a backward keeps of its forward's tensors: as torch, nothing that gradients do not read."""

import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pycutfuse as pcf

Call = Callable[..., Tensor]
CALLS: dict[str, tuple[Call, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (pcf.ops.linear, (5, 64), (8, 64), (5, 8)),
    "convolution": (pcf.ops.conv2d, (2, 3, 8, 8), (8, 3, 3, 3), (2, 8, 6, 6)),
}


def draw(name: str, device: torch.device | str) -> tuple[Call, list[Tensor]]:
    """A call, and x, weight, bias and a tensor of the result's shape."""
    call, x, weight, out = CALLS[name]
    generator = torch.Generator().manual_seed(1)
    shapes = (x, weight, weight[:1], out)
    tensors = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    return call, [one.requires_grad_() for one in tensors]


@pytest.fixture(params=CALLS)
def drawn(request: pytest.FixtureRequest, device: torch.device) -> tuple[Call, list[Tensor]]:
    return draw(request.param, device)


def grads_of(result: Tensor, tensors: list[Tensor]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(result.square().sum(), tensors, allow_unused=True)


@pytest.mark.parametrize("last", [(), (pcf.mul(2.0),)])
def test_summands_may_be_written_to(
    drawn: tuple[Call, list[Tensor]], last: tuple[pcf.Step, ...]
) -> None:
    call, (x, weight, bias, other) = drawn
    tensors = [x, weight, bias, other]
    expected = grads_of(call(x, weight, bias, epilogue=(pcf.add(other), *last)), tensors)
    result = call(x, weight, bias, epilogue=(pcf.add(other), *last))
    with torch.no_grad():
        bias.fill_(torch.nan)
        other.fill_(torch.nan)
    for found, one in zip(grads_of(result, tensors), expected, strict=True):
        torch.testing.assert_close(found, one)


@pytest.mark.parametrize("name", CALLS)
def test_those_before_a_function_may_not(name: str) -> None:
    """Where PyTorch's chain runs, which may be on CUDA, it keeps the function's result."""
    call, (x, weight, bias, other) = draw(name, "cpu")
    for changed in (bias, other):
        result = call(x, weight, bias, epilogue=(pcf.add(other), pcf.sigmoid()))
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            grads_of(result, [x])


def test_a_summand_at_the_end_is_freed(drawn: tuple[Call, list[Tensor]]) -> None:
    call, (x, weight, bias, other) = drawn
    residual = other.detach().clone()
    result = call(x, weight, bias, epilogue=(pcf.sigmoid(), pcf.add(residual)))
    alive = weakref.ref(residual)
    del residual
    assert alive() is None
    assert all(one is not None for one in grads_of(result, [x, weight, bias]))


def test_a_factor_is_kept(drawn: tuple[Call, list[Tensor]]) -> None:
    call, (x, weight, bias, other) = drawn
    result = call(x, weight, bias, epilogue=(pcf.mul(other),))
    with torch.no_grad():
        other.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grads_of(result, [x])


@pytest.mark.parametrize("name", CALLS)
def test_compiling_warns_of_nothing(name: str) -> None:
    call, (x, weight, bias, _) = draw(name, "cpu")
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        grads_of(compiled(x, weight, bias), [x, weight, bias])
    assert not [one for one in found if "lru_cache" in str(one.message)]
