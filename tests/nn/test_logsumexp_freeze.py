"""Both weights of LinearSigmoidLinearLogSumExp are frozen together, and dropped together."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pycutfuse as pcf
from pycutfuse.nn import _base
from pycutfuse.ops import _frozen
from pycutfuse.testing import generate

PLANES = ("planes", "words", "planes2", "words2")
KINDS = {
    "one": lambda device: pcf.nn.LinearLogSumExp(96, 64, device=device),
    "two": lambda device: pcf.nn.LinearSigmoidLinearLogSumExp(96, 80, 64, device=device),
}


def batch() -> Tensor:
    return generate("randn", (130, 96), seed=3, device="cuda")


@pytest.fixture
def imitated(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A module on the CPU whose planes are made of nothing."""
    made = lambda weight, *_: (weight.new_zeros(8), weight.new_zeros(4))  # noqa: E731
    monkeypatch.setattr(_frozen, "why_not_frozen", lambda weight: None)
    monkeypatch.setattr(_frozen, "make_planes", made)
    torch.manual_seed(1)
    return pcf.nn.LinearSigmoidLinearLogSumExp(7, 6, 5).eval()


DROPS: dict[str, Callable[[nn.Module], object]] = {
    "unfreeze": pcf.unfreeze,
    "train": lambda m: m.train().eval(),
    "load": lambda m: m.load_state_dict(copy.deepcopy(m.state_dict())),
    "load_assign": lambda m: nn.Sequential(m).load_state_dict(
        copy.deepcopy(nn.Sequential(m).state_dict()), assign=True
    ),
    "to": lambda m: m.to("cpu"),
    "float": lambda m: nn.Sequential(m).float(),
    "parameter": lambda m: m.register_parameter("other", nn.Parameter(torch.ones(1))),
}


@pytest.mark.parametrize("drop", DROPS)
def test_what_drops_both(imitated: nn.Module, drop: str) -> None:
    keys = list(imitated.state_dict())
    assert pcf.freeze(imitated) is imitated
    assert imitated.frozen
    assert "frozen" in repr(imitated)
    assert all(getattr(imitated, name) is not None for name in PLANES)
    assert list(imitated.state_dict()) == keys
    DROPS[drop](imitated)
    assert not imitated.frozen
    assert all(getattr(imitated, name) is None for name in PLANES)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_not_frozen(imitated: nn.Module, how) -> None:
    made = how(pcf.freeze(imitated))
    assert imitated.frozen
    assert all(getattr(made, name) is None for name in PLANES)


def test_one_weight_that_cannot_be_frozen(imitated: nn.Module, monkeypatch) -> None:
    reasons = {6: None, 5: "dtype float64"}
    monkeypatch.setattr(_frozen, "why_not_frozen", lambda weight: reasons[weight.shape[0]])
    pcf.freeze(imitated)
    assert all(getattr(imitated, name) is None for name in PLANES)
    assert pcf.counters()["fallback"] == {"freeze: dtype float64": 1}


def test_on_the_cpu_nothing_is_frozen() -> None:
    layer = pcf.nn.LinearSigmoidLinearLogSumExp(7, 6, 5)
    with pytest.raises(RuntimeError, match="training mode"):
        pcf.freeze(layer)
    assert not pcf.freeze(layer.eval()).frozen
    assert pcf.counters()["fallback"] == {"freeze: cpu tensors": 1}
    assert isinstance(layer, _base.FusedModule)


@pytest.fixture(params=KINDS)
def layer(request: pytest.FixtureRequest, cuda: torch.device) -> nn.Module:
    torch.manual_seed(1)
    return KINDS[request.param](cuda).eval()


def weights(layer: nn.Module) -> list[nn.Parameter]:
    return [p for p in layer.parameters() if p.dim() == 2]


@pytest.mark.cuda
@pytest.mark.parametrize("tier", ["ieee", "tf32"])
def test_the_result_is_the_same(layer: nn.Module, tier: str, fused: None) -> None:
    with torch.no_grad(), pcf.precision(tier):
        before = layer(batch())
        assert pcf.freeze(layer).frozen
        assert torch.equal(layer(batch()), before)
        pcf.unfreeze(layer)
        assert torch.equal(layer(batch()), before)


@pytest.mark.cuda
def test_gradients_flow_through_a_frozen_module(layer: nn.Module, fused: None) -> None:
    x = batch().requires_grad_()
    (before,) = torch.autograd.grad(layer(x).sum(), x)
    pcf.freeze(layer)
    (after,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(after, before)


@pytest.mark.cuda
def test_changes_are_seen_only_while_not_frozen(layer: nn.Module, fused: None) -> None:
    for at in range(len(weights(layer))):
        with torch.no_grad():
            before = layer(batch())
            pcf.freeze(layer)
            weights(layer)[at].mul_(2)
            assert torch.equal(layer(batch()), before)
            pcf.unfreeze(layer)
            expected = layer.to_torch()(batch())
            assert not torch.equal(layer(batch()), before)
            torch.testing.assert_close(layer(batch()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_a_weight_of_another_shape_is_refused(layer: nn.Module) -> None:
    pcf.freeze(layer)
    weight = weights(layer)[-1]
    weight.data = torch.zeros(weight.shape[0] + 8, weight.shape[1], device="cuda")
    for bias in (p for p in layer.parameters() if p.shape == (64,)):
        bias.data = torch.zeros(72, device="cuda")
    with pytest.raises(RuntimeError, match="unfreeze"):
        layer(batch())


@pytest.mark.cuda
def test_a_graph_of_a_frozen_module(layer: nn.Module, fused: None) -> None:
    x = batch()
    pcf.freeze(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        layer(x)
        with torch.cuda.graph(graph):
            result = layer(x)
        for seed in range(3):
            x.copy_(generate("randn", (130, 96), seed=seed))
            graph.replay()
            assert torch.equal(result, layer(x))


@pytest.mark.cuda
def test_a_compiled_frozen_module(layer: nn.Module) -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        expected = layer(batch())
        compiled = torch.compile(pcf.freeze(layer), fullgraph=True)
        assert torch.equal(compiled(batch()), expected)
        pcf.unfreeze(layer)
        assert torch.equal(compiled(batch()), expected)
