"""Frozen weights: what they promise, what drops them, and what they do not see."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import pycutfuse as pcf
from pycutfuse.testing import generate


def layers(device: torch.device) -> dict[str, nn.Module]:
    torch.manual_seed(1)
    return {
        "linear": pcf.nn.Linear(96, 64, device=device, epilogue=(pcf.relu(),)).eval(),
        "norm": pcf.nn.LinearScaleBatchNorm1d(96, 64, (64,), device=device).eval(),
    }


def weight_of(layer: nn.Module) -> nn.Parameter:
    return layer.weight if isinstance(layer, pcf.nn.Linear) else layer.gemm.weight


@pytest.fixture(params=["linear", "norm"])
def layer(request: pytest.FixtureRequest, cuda: torch.device) -> nn.Module:
    return layers(cuda)[request.param]


def batch(device: torch.device | str = "cuda") -> Tensor:
    return generate("randn", (130, 96), seed=3, device=device)


def assert_same(result: Tensor, expected: Tensor) -> None:
    """Of a frozen weight the planes are multiplied, of another also fp32 values, where few are."""
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_training_mode_is_refused(device: torch.device) -> None:
    for layer in layers(device).values():
        with pytest.raises(RuntimeError, match=r"training mode.*\.eval\(\)"):
            pcf.freeze(nn.Sequential(layer.train()))
        with pytest.raises(RuntimeError, match=r"training mode.*\.eval\(\)"):
            layer.freeze()
        assert not layer.frozen


def test_what_is_no_module_is_refused() -> None:
    for change in (pcf.freeze, pcf.unfreeze):
        with pytest.raises(TypeError, match=r"a str; it must be a torch\.nn\.Module"):
            change("layer")  # type: ignore[arg-type]


def test_on_the_cpu_nothing_is_frozen() -> None:
    for layer in layers(torch.device("cpu")).values():
        before = layer(batch("cpu"))
        assert pcf.freeze(layer) is layer
        assert not layer.frozen
        assert torch.equal(layer(batch("cpu")), before)
    assert pcf.counters()["fallback"]["freeze: cpu tensors"] == 2


@pytest.mark.cuda
def test_the_result_is_the_same(layer: nn.Module, fused: None) -> None:
    with torch.no_grad():
        before = layer(batch())
        keys = list(layer.state_dict())
        assert pcf.freeze(nn.Sequential(layer))[0] is layer
        assert layer.frozen
        assert_same(layer(batch()), before)
        assert list(layer.state_dict()) == keys
        pcf.unfreeze(layer)
        assert not layer.frozen
        assert torch.equal(layer(batch()), before)


@pytest.mark.cuda
def test_gradients_flow_through_a_frozen_module(layer: nn.Module, fused: None) -> None:
    x = batch().requires_grad_()
    layer(x).sum().backward()
    before, x.grad = x.grad, None
    pcf.freeze(layer)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, before)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "drop",
    [
        pcf.unfreeze,
        lambda m: m.train().eval(),
        lambda m: m.load_state_dict(copy.deepcopy(m.state_dict())),
        lambda m: nn.Sequential(m).load_state_dict(
            copy.deepcopy(nn.Sequential(m).state_dict()), assign=True
        ),
        lambda m: m.to("cuda"),
        lambda m: m.float(),
        lambda m: nn.Sequential(m).cpu().cuda(),
        lambda m: m.double().float(),
    ],
    ids="unfreeze train load load_assign to float cpu double".split(),
)
def test_what_drops_the_planes(layer: nn.Module, drop) -> None:
    pcf.freeze(layer)
    drop(layer)
    assert not layer.frozen
    with torch.no_grad():
        weight_of(layer).mul_(2)
        expected = layer.to_torch()(batch())
        torch.testing.assert_close(layer(batch()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_eval_keeps_the_planes(layer: nn.Module) -> None:
    pcf.freeze(layer)
    assert layer.eval().frozen


def _change(layer: nn.Module, how: str) -> None:
    weight = weight_of(layer)
    if how == "in_place":
        with torch.no_grad():
            weight.mul_(2)
    elif how == "data":
        weight.data.mul_(2)
    elif how == "optimizer":
        optimizer = torch.optim.SGD([weight], lr=1.0)
        weight.grad = -weight.detach().clone()
        optimizer.step()
    elif how == "fused_optimizer":
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
        weight.grad = -weight.detach().clone()
        optimizer.step()
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            weight.mul_(2)
        graph.replay()


CHANGES = ["in_place", "data", "optimizer", "fused_optimizer", "replayed"]


@pytest.mark.cuda
@pytest.mark.parametrize("how", CHANGES)
def test_an_unfrozen_module_sees_every_change(layer: nn.Module, how: str, fused: None) -> None:
    with torch.no_grad():
        before = layer(batch())
    _change(layer, how)
    with torch.no_grad():
        result, expected = layer(batch()), layer.to_torch()(batch())
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        assert not torch.equal(result, before)


@pytest.mark.cuda
@pytest.mark.parametrize("how", CHANGES)
def test_a_frozen_module_sees_none_until_it_is_frozen_anew(layer: nn.Module, how: str) -> None:
    pcf.freeze(layer)
    with torch.no_grad():
        before = layer(batch())
    _change(layer, how)
    with torch.no_grad():
        assert torch.equal(layer(batch()), before)
        expected = layer.to_torch()(batch())
        torch.testing.assert_close(pcf.freeze(layer)(batch()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_a_new_parameter_drops_the_planes(cuda: torch.device) -> None:
    layer = pcf.freeze(layers(cuda)["linear"])
    layer.weight = nn.Parameter(torch.zeros_like(layer.weight))
    assert not layer.frozen


@pytest.mark.cuda
def test_a_weight_of_another_shape_is_refused(layer: nn.Module) -> None:
    pcf.freeze(layer)
    weight_of(layer).data = torch.zeros(64, 72, device="cuda")
    with pytest.raises(RuntimeError, match="unfreeze"):
        layer(torch.zeros(3, 72, device="cuda"))


@pytest.mark.cuda
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_not_frozen(layer: nn.Module, how) -> None:
    pcf.freeze(layer)
    made = how(layer)
    assert layer.frozen
    assert not made.frozen
    with torch.no_grad():
        assert_same(made(batch()), layer(batch()))


@pytest.mark.cuda
def test_planes_are_ordered_for_other_streams(layer: nn.Module, fused: None) -> None:
    weight = weight_of(layer)
    with torch.no_grad():
        weight.mul_(3)
        expected = layer(batch())
        weight.div_(3)
    x, side = batch(), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the split queues behind this
    with torch.no_grad():
        weight.mul_(3)
        pcf.freeze(layer)
        with torch.cuda.stream(side):
            result = layer(x)
    side.synchronize()
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
def test_freeze_refuses_a_capture_and_frozen_forwards_allow_one(layer: nn.Module) -> None:
    x = batch()
    with torch.no_grad():
        expected = layer(x)
    graph = torch.cuda.CUDAGraph()
    pcf.freeze(layer)
    with torch.no_grad(), torch.cuda.graph(graph):
        result = layer(x)
    graph.replay()
    assert_same(result, expected)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="captured"):
        pcf.freeze(layer)


@pytest.mark.cuda
def test_a_compiled_frozen_module(layer: nn.Module) -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        expected = layer(batch())
        compiled = torch.compile(pcf.freeze(layer), fullgraph=True)
        assert_same(compiled(batch()), expected)
        pcf.unfreeze(layer)
        assert torch.equal(compiled(batch()), expected)
