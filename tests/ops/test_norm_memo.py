"""LinearScaleBatchNorm1d, once it remembers its launch, still sees all that its children say."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pycutfuse as pcf
from pycutfuse.ops import _frozen, _launch, _memo, _workspace
from pycutfuse.ops import _linear_batch_norm_raw as raw

from .simulated import Binding, install

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Binding]:
    """The simulated binding behind the module: host tensors are launched."""
    assert _memo.Memo.trusted
    monkeypatch.setattr(raw, "forward", raw._forward_cuda)
    held: dict[int, Tensor] = {}

    def allocate(size: int, stream: int) -> int:
        memory = torch.empty(size, dtype=torch.uint8)
        held[memory.data_ptr()] = memory
        return memory.data_ptr()

    monkeypatch.setattr(_workspace, "_allocate", allocate)
    monkeypatch.setattr(_workspace, "release", lambda address: held.pop(address))
    yield install(monkeypatch)
    assert held == {}
    _launch.clear_caches()


def make(precision: Any = "ieee", **options: Any) -> nn.Module:
    torch.manual_seed(1)
    return pcf.nn.LinearScaleBatchNorm1d(6, 4, (4,), precision=precision, **options)


def warm(layer: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let `layer` record its call; says of each later one whether it was replayed."""
    for _ in range(4):  # planned, found, remembered, recorded
        layer(x)
    again: list[bool] = []
    inner = layer._memo.replay

    def spy(*given: Any) -> Any:
        found = inner(*given)
        again.append(found is not None)
        return found

    layer._memo.replay = spy
    return again


def same(layer: nn.Module, twin: nn.Module, x: Tensor, grad: bool = False) -> None:
    with torch.set_grad_enabled(grad):
        one, other = layer(x), twin(x)
    torch.testing.assert_close(one, other, **CLOSE)
    for name, tensor in twin.named_buffers():
        torch.testing.assert_close(dict(layer.named_buffers())[name], tensor, **CLOSE)
    if grad:
        pairs = [dict(module.named_parameters()) for module in (layer, twin)]
        assert pairs[0].keys() == pairs[1].keys()
        wanted = [name for name, one in pairs[0].items() if one.requires_grad]
        found = [
            torch.autograd.grad(value.square().sum(), [pair[name] for name in wanted])
            for value, pair in zip((one, other), pairs, strict=True)
        ]
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda m: None,
    "eps": lambda m: setattr(m.bn, "eps", 0.5),
    "momentum": lambda m: setattr(m.bn, "momentum", 0.7),
    "no momentum": lambda m: setattr(m.bn, "momentum", None),
    "eval": lambda m: m.bn.eval(),
    "untracked": lambda m: setattr(m.bn, "track_running_stats", False),
    "uncounted": lambda m: setattr(m.bn, "num_batches_tracked", None),
    "no statistics": lambda m: [setattr(m.bn, f"running_{n}", None) for n in ("mean", "var")],
    "no affine": lambda m: [setattr(m.bn, name, None) for name in ("weight", "bias")],
    "no bias": lambda m: setattr(m.gemm, "bias", None),
    "scale": lambda m: setattr(m, "scale", nn.Parameter(torch.rand(1, 4))),
    "frozen": lambda m: m.gemm.weight.requires_grad_(False),
    "all frozen": lambda m: m.requires_grad_(False),
    "another norm": lambda m: setattr(m, "bn", nn.BatchNorm1d(4, eps=0.1)),
    "parametrized": lambda m: nn.utils.parametrizations.weight_norm(m.gemm),
    "parametrized scale": lambda m: nn.utils.parametrize.register_parametrization(
        m, "scale", nn.Tanh()
    ),
    "negative momentum": lambda m: setattr(m.bn, "momentum", -0.5),
    "a layer of another kind": lambda m: setattr(m, "gemm", DoubledLinear(6, 4)),
    "a norm of another kind": lambda m: setattr(m, "bn", Doubled(4)),
}


class DoubledLinear(nn.Linear):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * super().forward(value)


class Doubled(nn.BatchNorm1d):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * super().forward(value)


# With all frozen nothing is differentiated.
@pytest.mark.parametrize(
    ("change", "grad"),
    [(one, grad) for one in CHANGES for grad in (False, True) if not grad or one != "all frozen"],
)
def test_a_change_of_the_children_is_seen(
    change: str, grad: bool, binding: Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = make(), torch.rand(5, 6)
    twin = Plain(layer)
    with torch.set_grad_enabled(grad):
        again = warm(layer, x, monkeypatch)
    twin.follow()
    for _ in range(2):
        same(layer, twin, x, grad)
    assert again == [True] * 2
    torch.manual_seed(2)
    CHANGES[change](layer)
    twin.follow()
    for _ in range(4):
        same(layer, twin, x, grad)


class Plain(nn.Module):
    """The chain of a copy of a module; `follow` copies it again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "source", layer)

    def follow(self) -> None:
        self.own = copy.deepcopy(self.source)

    def named_buffers(self, *given: Any, **options: Any) -> Any:
        return self.own.named_buffers(*given, **options)

    def named_parameters(self, *given: Any, **options: Any) -> Any:
        return self.own.named_parameters(*given, **options)

    def forward(self, x: Tensor) -> Tensor:
        own = self.own
        return own.epilogue(own.bn(own.gemm(x) * own.scale))


@pytest.mark.parametrize("child", ["gemm", "bn"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "instance", "all"])
def test_hooks_are_seen(
    child: str, kind: str, binding: Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x, seen = make(), torch.rand(5, 6, requires_grad=True), []
    again = warm(layer, x, monkeypatch)
    module = layer.get_submodule(child)
    if kind == "all":
        handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    elif kind == "instance":
        inner = module.forward
        module.forward = lambda value: seen.append(1) or inner(value)
    else:
        handle = getattr(module, f"register_{kind}_hook")(lambda *_: seen.append(1))
    layer(x).sum().backward()
    assert seen
    assert again == [False]
    if kind == "instance":
        del module.forward
    else:
        handle.remove()
    layer(x)
    assert again == [False, True]


def test_an_epilogue_is_read_anew(binding: Binding, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make(epilogue=(pcf.mul(nn.Parameter(torch.rand(4))), pcf.relu())), torch.rand(5, 6)
    twin = Plain(layer)
    again = warm(layer, x, monkeypatch)
    twin.follow()
    same(layer, twin, x, grad=True)
    assert again == [True]
    layer.epilogue.get_submodule("0").weight.data = torch.rand(4)
    twin.follow()
    same(layer, twin, x, grad=True)
    assert again == [True] * 2
    layer.epilogue.get_submodule("0").register_forward_hook(lambda *_: again.append(None))
    layer(x)
    assert again == [True, True, False, None]


def test_invalid_calls_raise_as_before(binding: Binding, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make(), torch.rand(5, 6)
    warm(layer, x, monkeypatch)
    before = copy.deepcopy(layer.bn.state_dict())
    with pytest.raises(TypeError, match="x is a list"):
        layer([x])
    with pytest.raises(ValueError, match="more than 1 value"):
        layer(x[:1])
    for wrong in (x[:, :5], x.double()):
        with pytest.raises(RuntimeError):
            layer(wrong)
    layer.bn.momentum = -0.5
    assert "negative" in str(layer.why_chain(x))
    layer.bn.momentum = 0.1
    for name, tensor in layer.bn.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_planes_of_another_weight_are_not_used(
    binding: Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = make().eval(), torch.rand(5, 6)
    shapes = ((2, 4, 2 * 8), binding.planes_layout(4, 6, 2)[2:])
    monkeypatch.setattr(_frozen, "why_not_frozen", lambda weight: None)
    monkeypatch.setattr(
        _frozen, "make_planes", lambda *_: [torch.ones(n, dtype=torch.uint8) for n in shapes]
    )
    weight = pcf.freeze(layer).gemm.weight
    with torch.no_grad():
        again = warm(layer, x, monkeypatch)
        for present, planes in ((weight, True), (nn.Parameter(weight + 1), False), (weight, True)):
            layer.gemm._parameters["weight"] = present
            layer(x)
            assert bool(binding.last["problem"].weight_planes) == planes
    assert again[0] is True
