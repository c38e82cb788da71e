"""What the fused convolutions do not support gives torch's answer and is counted."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import pycutfuse as pcf
from pycutfuse.ops import _conv_batch_norm_raw, _conv_raw, _gate, _launch
from pycutfuse.testing import generate

from ..cases.conv import ConvCase
from .simulated_conv import ConvBinding, install


class Tagged(Tensor):
    """A subclass with torch's behaviour."""


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return generate("randn", shape, seed=seed)


def reasons() -> str:
    return " ".join(pcf.counters()["fallback"])


def test_float64_gradients_are_twice_differentiable() -> None:
    x = draw((1, 2, 4, 4), 1).double().requires_grad_()
    layer = pcf.nn.Conv2d(2, 2, 3, dtype=torch.float64, epilogue=(pcf.tanh(),))
    assert torch.autograd.gradgradcheck(layer, (x,))
    norm = pcf.nn.Conv2dBatchNorm2dScale(2, 2, 3, 0.5, dtype=torch.float64)
    torch.testing.assert_close(norm(x), norm.to_torch()(x))
    assert "float64" in reasons()


def test_a_float64_operand_promotes_as_in_torch(device: torch.device) -> None:
    case = ConvCase()
    tensors, operand = case.draw(draw, device=device), draw((6, 1, 1), 4).double().to(device)
    result = case.ours(*tensors, epilogue=(pcf.mul(operand),))
    assert result.dtype == torch.float64
    assert torch.equal(result, case.theirs(*tensors) * operand)


def test_a_subclass(device: torch.device) -> None:
    case = ConvCase()
    x, weight, bias = case.draw(draw, device=device)
    result = case.ours(x.as_subclass(Tagged), weight, bias, epilogue=(pcf.relu(),))
    assert type(result) is Tagged
    assert "Tagged" in reasons()


def test_transforms(device: torch.device) -> None:
    case = ConvCase(batch=3)
    x, weight, bias = case.draw(draw, device=device)
    result = torch.func.vmap(lambda image: case.ours(image, weight, bias))(x)
    torch.testing.assert_close(result, case.theirs(x, weight, bias), rtol=1e-3, atol=1e-3)
    found = torch.func.grad(lambda weight: case.ours(x, weight, bias).sum())(weight)
    expected = torch.func.grad(lambda weight: case.theirs(x, weight, bias).sum())(weight)
    torch.testing.assert_close(found, expected)
    assert "torch.func" in reasons()


def test_forward_mode(device: torch.device) -> None:
    case = ConvCase()
    x, weight, bias = case.draw(draw, device=device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(case.ours(dual, weight, bias)).tangent
    expected = F.conv2d(torch.ones_like(x), weight)
    torch.testing.assert_close(tangent, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_the_cpu(dtype: torch.dtype) -> None:
    layer = pcf.nn.Conv2d(4, 6, 3, epilogue=(pcf.silu(),))
    norm = pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, 2.0)
    x = draw((2, 4, 7, 7), 1)
    with torch.autocast("cpu", dtype):
        result, normal = layer(x), norm(x)
        expected, chain = layer.to_torch()(x), norm.to_torch()(x)
    assert result.dtype == dtype
    assert torch.equal(result, expected)
    assert normal.dtype == chain.dtype
    assert "autocast" in reasons()


def test_meta_tensors() -> None:
    layer = pcf.nn.Conv2d(4, 6, 3, device="meta").eval()
    assert layer(torch.empty(2, 4, 7, 7, device="meta")).shape == (2, 6, 5, 5)


def test_the_error_policy(device: torch.device) -> None:
    pcf.set_fallback_policy("error")
    x = torch.ones(1, 1, 2, 2, dtype=torch.float64, device=device)
    with pytest.raises(pcf.FallbackError, match="conv2d: dtype float64"):
        pcf.ops.conv2d(x, torch.ones(1, 1, 1, 1, dtype=torch.float64, device=device))


@pytest.fixture(params=[torch.float16, torch.bfloat16])
def autocast(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Autocast of CUDA to this dtype; the context manager itself refuses without a GPU."""
    torch.set_autocast_dtype("cuda", request.param)
    torch.set_autocast_enabled("cuda", True)
    yield request.param
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", torch.float16)


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConvBinding]:
    """Host tensors take the road of CUDA tensors."""
    monkeypatch.setattr(_gate, "autocasts", lambda x: torch.is_autocast_enabled("cuda"))
    monkeypatch.setattr(_gate, "_ON_CPU", _gate._DTYPES)
    for raw in (_conv_raw, _conv_batch_norm_raw):
        monkeypatch.setattr(raw, "forward", raw._forward_cuda)
    yield install(monkeypatch)
    _launch.clear_caches()


def _cast(layer: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    chain = copy.deepcopy(layer.to_torch())
    convolution = chain.conv if hasattr(chain, "conv") else chain
    convolution.to(dtype)
    return chain(x.to(dtype))


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_casts_the_convolution_alone(grad: bool, autocast, binding: ConvBinding) -> None:
    x = draw((2, 4, 7, 7), 1)
    for layer in (
        pcf.nn.Conv2d(4, 6, 3),
        pcf.nn.ConvTranspose2d(4, 6, 3, bias=False),
        pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, 2.0).eval(),
    ):
        for _ in range(2):
            with torch.set_grad_enabled(grad):
                result = layer(x)
            torch.set_autocast_enabled("cuda", False)
            expected = _cast(layer, x, autocast)
            torch.set_autocast_enabled("cuda", True)
            assert result.dtype is expected.dtype is autocast
            torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
            if grad:
                result.float().sum().backward()
                assert next(layer.parameters()).grad.dtype is torch.float32
    assert binding.launched >= 6
    assert pcf.counters()["fallback"] == {}


def test_autocast_widens_softplus(autocast, binding: ConvBinding) -> None:
    case = ConvCase()
    case.ours(*case.draw(draw), epilogue=(pcf.softplus(),))
    assert "softplus in float32" in reasons()
    assert binding.launched == 0


def test_a_half_result_that_torch_promotes(autocast, binding: ConvBinding) -> None:
    case = ConvCase()
    tensors = case.draw(draw)
    result = case.ours(*tensors, epilogue=(pcf.mul(draw((6, 1, 1), 4)),))
    assert result.dtype is torch.float32
    assert "promotes" in reasons()
