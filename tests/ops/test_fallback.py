"""What the fused path does not support gives torch's answer, is counted, and follows the policy."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

import pycutfuse as pcf


class Tagged(Tensor):
    """A subclass with torch's behaviour."""


def draw(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(device, dtype)


def reasons() -> str:
    return " ".join(pcf.counters()["fallback"])


@pytest.mark.parametrize(
    ("where", "dtype"),
    [
        ("cpu", torch.float64),
        ("cpu", torch.float16),
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.float64, marks=pytest.mark.cuda),  # kernels run the others
    ],
)
def test_other_dtypes(where: str, dtype: torch.dtype) -> None:
    device = torch.device(where)
    x, weight, bias = (draw(*s, device=device, dtype=dtype) for s in ((6, 5), (4, 5), (4,)))
    result = pcf.ops.linear(x, weight, bias, epilogue=(pcf.gelu(), pcf.mul(bias)))
    assert torch.equal(result, F.gelu(F.linear(x, weight, bias)) * bias)
    stats = {"running_mean": bias.clone(), "running_var": bias.abs()}
    result = pcf.ops.linear_batch_norm(x, weight, bias, **stats)
    expected = F.batch_norm(F.linear(x, weight, bias), *stats.values())
    assert torch.equal(result, expected)
    assert str(dtype).removeprefix("torch.") in reasons()


def test_float64_gradients_are_twice_differentiable() -> None:
    x = draw(3, 4, device=torch.device("cpu"), dtype=torch.float64).requires_grad_()
    layer = pcf.nn.Linear(4, 2, dtype=torch.float64, epilogue=(pcf.tanh(),))
    assert torch.autograd.gradgradcheck(layer, (x,))


def test_a_float64_operand_promotes_as_in_torch(device: torch.device) -> None:
    x, weight = draw(6, 5, device=device), draw(4, 5, device=device)
    operand = draw(4, device=device, dtype=torch.float64)
    result = pcf.ops.linear(x, weight, epilogue=(pcf.mul(operand),))
    assert result.dtype == torch.float64
    assert torch.equal(result, F.linear(x, weight) * operand)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_the_cpu(dtype: torch.dtype) -> None:
    layer = pcf.nn.Linear(5, 4, epilogue=(pcf.silu(),))
    norm = pcf.nn.LinearScaleBatchNorm1d(5, 4, (4,))
    x = draw(6, 5, device=torch.device("cpu"))
    with torch.autocast("cpu", dtype):
        result, normal = layer(x), norm(x)
        expected = F.silu(F.linear(x, layer.weight, layer.bias))
        chain = norm.to_torch()(x)
    assert result.dtype == dtype
    assert torch.equal(result, expected)
    assert normal.dtype == chain.dtype
    result.sum().backward()
    assert layer.weight.grad is not None
    assert "autocast" in reasons()


def test_a_subclass(device: torch.device) -> None:
    x, weight = draw(6, 5, device=device).as_subclass(Tagged), draw(4, 5, device=device)
    for _ in range(2):
        result = pcf.ops.linear(x, weight, epilogue=(pcf.relu(),))
        assert type(result) is Tagged
    plain = x.as_subclass(Tensor)
    assert type(pcf.ops.linear(plain, weight)) is Tensor
    assert "Tagged" in reasons()


def test_vmap_and_functional_gradients(device: torch.device) -> None:
    x, weight = draw(3, 6, 5, device=device), draw(4, 5, device=device)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return pcf.ops.linear(x, weight, epilogue=(pcf.tanh(),)).sum()

    expected = torch.stack([call(row, weight) for row in x])
    torch.testing.assert_close(torch.func.vmap(call, (0, None))(x, weight), expected)
    grads = torch.func.vmap(torch.func.grad(call), (0, None))(x, weight)
    assert grads.shape == x.shape
    assert "torch.func" in reasons()


def test_forward_mode_derivatives(device: torch.device) -> None:
    x, weight, tangent = (draw(*s, device=device) for s in ((6, 5), (4, 5), (6, 5)))
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        result = forward_ad.unpack_dual(pcf.ops.linear(dual, weight)).tangent
    torch.testing.assert_close(result, F.linear(tangent, weight))


def test_a_weight_of_one_dimension(device: torch.device) -> None:
    x, weight = draw(6, 5, device=device), draw(5, device=device)
    torch.testing.assert_close(pcf.ops.linear(x, weight), F.linear(x, weight))


@pytest.mark.cuda
def test_a_scalar_operand_on_the_cpu_is_taken_as_in_torch(cuda: torch.device) -> None:
    x, weight = draw(6, 5, device=cuda), draw(4, 5, device=cuda)
    result = pcf.ops.linear(x, weight, epilogue=(pcf.mul(torch.tensor(2.0)),))
    assert torch.equal(result, F.linear(x, weight) * 2.0)


def test_meta_tensors_have_shapes() -> None:
    layer = pcf.nn.Linear(5, 4, device="meta", epilogue=(pcf.relu(),))
    norm = pcf.nn.LinearScaleBatchNorm1d(5, 4, (4,), device="meta")
    x = torch.empty(6, 5, device="meta")
    assert layer(x).shape == norm(x).shape == (6, 4)
    assert layer(x).is_meta


def test_a_nested_input() -> None:
    rows, weight = [torch.rand(2, 5), torch.rand(3, 5)], draw(4, 5, device=torch.device("cpu"))
    for layout in (torch.strided, torch.jagged):
        x = torch.nested.nested_tensor(rows, layout=layout)
        for one, row in zip(pcf.ops.linear(x, weight).unbind(), rows, strict=True):
            torch.testing.assert_close(one, F.linear(row, weight))


def test_a_sparse_input() -> None:
    x, weight = torch.eye(5).to_sparse(), draw(4, 5, device=torch.device("cpu"))
    torch.testing.assert_close(pcf.ops.linear(x, weight), F.linear(x, weight))


def test_inference_mode(device: torch.device) -> None:
    norm = pcf.nn.LinearScaleBatchNorm1d(5, 4, (4,), device=device)
    with torch.inference_mode():
        first = norm(draw(6, 5, device=device))
        made = pcf.nn.LinearScaleBatchNorm1d(5, 4, (4,), device=device)
        assert made(draw(6, 5, device=device)).shape == first.shape
    assert int(norm.bn.num_batches_tracked) == int(made.bn.num_batches_tracked) == 1


def test_it_warns_once_for_each_reason() -> None:
    pcf.set_fallback_policy("warn once")
    layer = pcf.nn.Linear(5, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            layer(torch.ones(2, 5))
            layer.double()(torch.ones(2, 5).double())
            layer.float()
    texts = [str(warning.message) for warning in caught]
    assert all(issubclass(warning.category, pcf.FallbackWarning) for warning in caught)
    assert len(texts) == 2
    assert "cpu tensors" in texts[0]
    assert "float64" in texts[1]
    assert pcf.counters()["fallback"] == {"linear: cpu tensors": 3, "linear: dtype float64": 3}


def test_the_error_policy_raises_before_anything_runs() -> None:
    pcf.set_fallback_policy("error")
    norm = pcf.nn.LinearScaleBatchNorm1d(5, 4, (4,))
    with pytest.raises(pcf.FallbackError, match="cpu tensors"):
        norm(torch.ones(2, 5))
    assert int(norm.bn.num_batches_tracked) == 0


@pytest.mark.cuda
def test_a_problem_without_work_is_handed_over(cuda: torch.device) -> None:
    pcf.set_fallback_policy("error")
    layer = pcf.nn.Linear(0, 4, device=cuda, epilogue=(pcf.mul(2.0),))
    with torch.no_grad():
        layer.bias.fill_(1.5)
    assert torch.equal(layer(torch.ones(3, 0, device=cuda)), torch.full((3, 4), 3.0, device=cuda))
    assert pcf.counters()["handover"] == {"linear: an empty problem": 1}
