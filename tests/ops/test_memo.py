"""What a module remembers of its last call never outlives a change of the tensors."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pycutfuse as pcf
from pycutfuse.ops import _launch, _linear, _memo
from pycutfuse.ops import _linear_batch_norm_raw as raw
from pycutfuse.ops._chain import ChainMemo
from pycutfuse.ops._conv_memo import ConvMemo
from pycutfuse.testing import forced_policy

from .simulated import Binding, install


def dispatched(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """What torch's dispatcher does before a kernel: it never sees a negation bit."""
    return lambda *given: kernel(*(t.resolve_neg() if isinstance(t, Tensor) else t for t in given))


@pytest.fixture(params=[True, False], ids=["guard", "no guard"])
def binding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Binding]:
    """The simulated binding behind the modules: host tensors are launched."""
    monkeypatch.setattr(_memo.Memo, "trusted", request.param)
    monkeypatch.setattr(_linear, "_forward_op", dispatched(_linear._forward_cuda))
    monkeypatch.setattr(raw, "forward", dispatched(raw._forward_cuda))
    monkeypatch.setattr(_linear.config, "resolve_tier", lambda precision: "ieee")
    yield install(monkeypatch)
    _launch.clear_caches()


def make(kind: str) -> nn.Module:
    torch.manual_seed(1)
    if kind == "linear":
        return pcf.nn.Linear(6, 4, epilogue=(pcf.mul(nn.Parameter(torch.rand(4))), pcf.relu()))
    return pcf.nn.LinearScaleBatchNorm1d(6, 4, (4,)).eval()


def agrees(layer: nn.Module, x: Tensor, binding: Binding) -> None:
    """Three calls launch, the last two from memory, and give the chain's answer."""
    twin = copy.deepcopy(layer.to_torch())
    before = binding.launched
    for _ in range(3):
        torch.testing.assert_close(layer(x), twin(x))
    assert binding.launched == before + 3


def replace(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.data = value


CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "data": lambda p: replace(p, p.data.clone() + 1),
    "strides": lambda p: replace(p, p.data.t().contiguous().t()),
    "gaps": lambda p: replace(p, p.data.repeat_interleave(2, -1)[..., ::2]),
    "negated": lambda p: replace(p, torch.complex(p.data, p.data).conj().imag),
    "in place": lambda p: p.data.mul_(2),
    "frozen": lambda p: p.requires_grad_(False),
}


@pytest.mark.parametrize("kind", ["linear", "norm"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_seen(kind: str, grad: bool, change: str, binding: Binding) -> None:
    layer, x = make(kind), torch.rand(5, 6)
    weight = layer.weight if kind == "linear" else layer.gemm.weight
    with torch.set_grad_enabled(grad):
        agrees(layer, x, binding)
        CHANGES[change](weight)
        agrees(layer, x, binding)


@pytest.mark.parametrize("kind", ["linear", "norm"])
def test_a_changed_input_is_seen(kind: str, binding: Binding) -> None:
    layer, wide = make(kind), torch.rand(7, 12)
    for x in (wide[:5, :6], wide[:5, ::2], wide[:, :6], wide[:5, :6].clone(), wide[:5, :6]):
        agrees(layer, x, binding)
    with pytest.raises(RuntimeError):
        layer(wide[:5])
    with pytest.raises(RuntimeError):
        layer(wide[:5, :6].double())
    agrees(layer, wide[:5, :6], binding)


def test_which_statistics_there_are_is_seen(binding: Binding) -> None:
    layer, x = make("norm"), torch.rand(5, 6)
    for change in (
        lambda: None,
        lambda: layer.bn.train(),
        lambda: setattr(layer.bn, "track_running_stats", False),
        lambda: layer.bn.register_parameter("weight", None),
        lambda: layer.bn.register_parameter("bias", None),
        lambda: setattr(layer.bn, "track_running_stats", True),
        lambda: layer.bn.eval(),
        lambda: layer.bn.register_parameter("bias", nn.Parameter(torch.rand(4))),
    ):
        change()
        agrees(layer, x, binding)


def test_a_vector_of_another_size_is_seen(binding: Binding) -> None:
    layer, x = make("linear"), torch.rand(5, 6)
    agrees(layer, x, binding)
    layer.bias.data = torch.rand(1)
    torch.testing.assert_close(layer(x), layer.to_torch()(x))
    layer.bias.data = torch.rand(3)
    with pytest.raises(RuntimeError, match="broadcast"):
        layer(x)


def test_a_shared_tensor_and_a_removed_parameter(binding: Binding) -> None:
    layer, x = make("norm"), torch.rand(5, 6)
    layer.scale = layer.gemm.bias  # a guard of torch refuses a tensor that is given twice
    agrees(layer, x, binding)
    linear = pcf.nn.Linear(6, 4)
    nn.utils.parametrize.register_parametrization(linear, "weight", nn.Tanh())
    for _ in range(3):
        torch.testing.assert_close(linear(x), F.linear(x, linear.weight, linear.bias))


def test_a_cleared_cache_is_forgotten(binding: Binding) -> None:
    layer, x = make("linear"), torch.rand(5, 6)
    agrees(layer, x, binding)
    planned = binding.planned
    with forced_policy("another"):  # type: ignore[arg-type]
        agrees(layer, x, binding)
    assert binding.planned == planned + 1


@pytest.mark.parametrize("kind", ["linear", "norm"])
def test_copies_start_anew(kind: str, binding: Binding) -> None:
    layer, x = make(kind), torch.rand(5, 6)
    agrees(layer, x, binding)
    for twin in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin._memo is not layer._memo
        agrees(twin, x, binding)


def test_a_parametrized_module_is_copied(binding: Binding) -> None:
    layer, x = make("linear"), torch.rand(5, 6)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh())
    for _ in range(3):
        expected = layer(x)
    twin = copy.deepcopy(layer)
    assert (twin._memo._entry, twin._memo._last) == (None, None)
    torch.testing.assert_close(twin(x), expected)


@pytest.mark.parametrize("kind", [_memo.Memo, ChainMemo, ConvMemo])
def test_copies_of_a_memo_are_empty(kind: type) -> None:
    memo = kind()
    memo._last = object()
    for twin in (copy.copy(memo), copy.deepcopy(memo), pickle.loads(pickle.dumps(memo))):
        assert type(twin) is kind
        assert twin._last is None


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_other_modes_of_the_thread(context, binding: Binding) -> None:
    layer, x = make("linear"), torch.rand(5, 6)
    agrees(layer, x, binding)
    with context():
        torch.testing.assert_close(layer(x).float(), layer.to_torch()(x).float())
    agrees(layer, x, binding)


def test_the_guard_is_tried() -> None:
    assert _memo.Memo.trusted
    assert not _memo._works(lambda tensors: lambda *given: True)
    assert not _memo._works(lambda tensors: lambda *given: False)
    assert not _memo._works(lambda tensors: None)  # type: ignore[arg-type, return-value]


def test_a_tensor_without_memory_is_not_launched(binding: Binding) -> None:
    layer, x = make("linear"), torch.rand(5, 6)
    agrees(layer, x, binding)
    zeros = torch._efficientzerotensor((5, 6))
    assert zeros.data_ptr() == 0
    for given, is_known in ((x, True), (zeros, False)):
        found, weight, planes, _, program, operands, _ = layer.run_arguments(given)
        for find in (_launch.cached, layer._memo.find):
            recipe = find((found, weight, planes, *operands), program, "ieee")
            assert (recipe is not None) == is_known
