"""What was made of a frozen weight is used for that weight alone, whatever takes its place."""

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.swa_utils import AveragedModel

import pycutfuse as pcf
from pycutfuse.ops import _conv_packed, _frozen

LINEAR = {
    "linear": lambda: pcf.nn.Linear(7, 5),
    "logsumexp": lambda: pcf.nn.LinearLogSumExp(7, 5),
    "norm": lambda: pcf.nn.LinearScaleBatchNorm1d(7, 5, (5,)),
    "two": lambda: pcf.nn.LinearSigmoidLinearLogSumExp(7, 7, 7),
}
CONV = {
    "conv": lambda: pcf.nn.Conv2d(7, 5, 3),
    "transposed": lambda: pcf.nn.ConvTranspose2d(7, 5, 3),
    "conv_norm": lambda: pcf.nn.Conv2dBatchNorm2dScale(7, 5, 3, 2.0),
}
KINDS = LINEAR | CONV
HOLDERS = {"norm": ("gemm",), "two": ("linear1", "linear2"), "conv_norm": ("conv",)}
FROZEN = ("planes", "words", "planes2", "words2", "snapshot")


@pytest.fixture(autouse=True)
def imitated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Planes made of nothing, and snapshots, on the CPU."""
    made = lambda weight, *_: (weight.new_zeros(8), weight.new_zeros(4))  # noqa: E731
    packed = lambda weight: _conv_packed.Frozen(  # noqa: E731
        _conv_packed._Written(weight.detach().clone(), 0, None)
    )
    monkeypatch.setattr(_frozen, "why_not_frozen", lambda weight: None)
    monkeypatch.setattr(_frozen, "make_planes", made)
    monkeypatch.setattr(_conv_packed, "why_not_frozen", lambda weight: None)
    monkeypatch.setattr(_conv_packed, "freeze", packed)
    yield
    torch._dynamo.reset()


def make(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return KINDS[kind]().eval()


def batch(layer: nn.Module) -> Tensor:
    return torch.rand(4, 7) if not hasattr(layer, "snapshot") else torch.rand(2, 7, 5, 6)


def used(layer: nn.Module) -> set[str]:
    """Names of the planes and snapshots that a call now would use."""
    make_call = getattr(layer, "run_arguments", None) or layer.call_arguments
    flat: list[object] = []
    for value in make_call(batch(layer)):
        flat += value if isinstance(value, tuple) else [value]
    made = {name: getattr(layer, name, None) for name in FROZEN}
    return {
        name
        for name, tensor in made.items()
        if tensor is not None and any(tensor is value for value in flat)
    }


def all_of(kind: str) -> set[str]:
    if kind in CONV:
        return {"snapshot"}
    return {"planes", "words", "planes2", "words2"} if kind == "two" else {"planes", "words"}


def holders(kind: str) -> tuple[str, ...]:
    return HOLDERS.get(kind, ("",))


def without(kind: str, holder: str) -> set[str]:
    """What is left for a call with another weight of `holder`."""
    left = {"linear1": {"planes2", "words2"}, "linear2": {"planes", "words"}}
    return left.get(holder, set())


@pytest.mark.parametrize("kind", KINDS)
def test_another_weight_for_one_call(kind: str) -> None:
    layer = pcf.freeze(make(kind))
    assert used(layer) == all_of(kind)
    forward = layer.forward
    for holder in holders(kind):
        found: list[set[str]] = []

        def spy(x: Tensor, found: list[set[str]] = found) -> Tensor:
            found.append(used(layer))
            return forward(x)

        layer.forward = spy
        name = f"{holder}.weight".lstrip(".")
        other = {name: torch.rand_like(layer.get_parameter(name))}
        torch.func.functional_call(layer, other, (batch(layer),))
        assert found == [without(kind, holder)]
        assert used(layer) == all_of(kind)
    assert layer.frozen


@pytest.mark.parametrize("kind", HOLDERS)
def test_another_child(kind: str) -> None:
    for holder in holders(kind):
        layer = pcf.freeze(make(kind))
        setattr(layer, holder, copy.deepcopy(layer.get_submodule(holder)))
        assert used(layer) == without(kind, holder)


@pytest.mark.parametrize("kind", HOLDERS)
def test_another_weight_of_a_child(kind: str) -> None:
    for holder in holders(kind):
        layer = pcf.freeze(make(kind))
        child = layer.get_submodule(holder)
        child.weight = nn.Parameter(child.weight.detach() + 1)
        assert used(layer) == without(kind, holder)


@pytest.mark.parametrize("kind", HOLDERS)
@pytest.mark.parametrize("assign", [False, True])
def test_a_child_that_loads_its_state_unfreezes(kind: str, assign: bool) -> None:
    for holder in holders(kind):
        layer = pcf.freeze(pcf.freeze(make(kind)))
        child = layer.get_submodule(holder)
        child.load_state_dict(copy.deepcopy(child.state_dict()), assign=assign)
        assert not layer.frozen
        assert pcf.freeze(layer).frozen
        child.load_state_dict(copy.deepcopy(child.state_dict()), assign=assign)
        assert not layer.frozen


@pytest.mark.parametrize("kind", HOLDERS)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_let_the_original_be(kind: str, how: Callable[[nn.Module], nn.Module]) -> None:
    layer = pcf.freeze(make(kind))
    for holder in holders(kind):
        for child in (how(layer).get_submodule(holder), how(layer.get_submodule(holder))):
            child.load_state_dict(copy.deepcopy(child.state_dict()))
    assert layer.frozen
    made = pcf.freeze(how(layer))
    assert used(made) == all_of(kind)
    child = made.get_submodule(holders(kind)[0])
    child.load_state_dict(copy.deepcopy(child.state_dict()))
    assert (layer.frozen, made.frozen) == (True, False)


@pytest.mark.parametrize("kind", HOLDERS)
def test_children_that_outlive_the_module_keep_nothing_of_it(kind: str) -> None:
    chain = make(kind).to_torch()
    for _ in range(3):
        layer = pcf.freeze(pcf.freeze(type(KINDS[kind]()).from_torch(chain)))
        for holder in holders(kind):
            assert len(chain.get_submodule(holder)._load_state_dict_pre_hooks) == 1
        del layer
    for holder in holders(kind):
        assert len(chain.get_submodule(holder)._load_state_dict_pre_hooks) == 0


COMPUTED = {"parametrization": parametrizations.spectral_norm, "old": weight_norm}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in HOLDERS])
@pytest.mark.parametrize("how", COMPUTED)
def test_a_computed_weight(kind: str, how: str) -> None:
    layer = pcf.freeze(make(kind))
    COMPUTED[how](layer)
    assert used(layer) == set()
    assert not pcf.freeze(layer).frozen
    assert list(pcf.counters()["fallback"]) == [
        "freeze: a weight that is computed anew at each call"
    ]


@pytest.mark.parametrize(
    ("kind", "holder"), [(kind, holder) for kind in HOLDERS for holder in holders(kind)]
)
def test_a_child_without_a_weight(kind: str, holder: str) -> None:
    layer = make(kind)
    setattr(layer, holder, nn.Identity())
    assert not pcf.freeze(layer).frozen
    assert list(pcf.counters()["fallback"]) == ["freeze: a child without a weight"]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_with_a_parametrization_are_not_frozen(kind: str) -> None:
    layer = pcf.freeze(make(kind))
    register_parametrization(layer.get_submodule(holders(kind)[0]), "bias", nn.Tanh())
    made, x = copy.deepcopy(layer), batch(layer)
    assert (layer.frozen, made.frozen) == (True, False)
    assert torch.equal(made(x), pcf.unfreeze(layer)(x))
    assert type(made.get_submodule(holders(kind)[0])).__name__.startswith("Parametrized")


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_are_no_further_parameters(kind: str) -> None:
    layer = make(kind)
    before, keys = len(list(layer.parameters())), list(layer.state_dict())
    pcf.freeze(layer)
    assert len(list(layer.parameters())) == before
    assert list(layer.state_dict()) == keys


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_with_planes_among_its_buffers(kind: str) -> None:
    layer = make(kind)
    state = layer.__getstate__()
    planes = {name: state.pop(name) for name in all_of(kind)}
    state["_buffers"] = state["_buffers"] | planes
    made = type(layer).__new__(type(layer))
    made.__setstate__(state)
    assert used(pcf.freeze(made)) == all_of(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_an_average_of_models_pairs_their_buffers(kind: str) -> None:
    model = nn.Sequential(make(kind), nn.BatchNorm1d(3))
    average = AveragedModel(model)
    average.update_parameters(model)
    pcf.freeze(average.eval())
    model[1].running_mean.fill_(2.0)
    average.update_parameters(model)
    assert torch.equal(average.module[1].running_mean, model[1].running_mean)
    assert len(list(average.module.buffers())) == len(list(model.buffers()))


@pytest.mark.parametrize("kind", LINEAR)
def test_a_graph_uses_them_while_the_weight_is_the_frozen_one(kind: str) -> None:
    layer, x, passed = pcf.freeze(make(kind)), torch.rand(4, 7), []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        passed.append(sum(node.op == "placeholder" for node in graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
        name = f"{holders(kind)[0]}.weight".lstrip(".")
        holder = layer.get_submodule(holders(kind)[0])
        holder._parameters["weight"] = nn.Parameter(layer.get_parameter(name) + 1)
        torch.testing.assert_close(compiled(x), layer.to_torch()(x))
    assert passed[1] == passed[0] - 2  # planes and words
