"""Conv2dBatchNorm2dScale behaves as its children: options, scales, hooks, odd inputs."""

import copy

import pytest
import torch
from torch import Tensor, nn

import pycutfuse as pcf
from pycutfuse.testing import generate

CLOSE = {"rtol": 2e-2, "atol": 2e-2}


def draw(*shape: int, device: torch.device | str = "cpu", seed: int = 1) -> Tensor:
    return generate("randn", shape, seed=seed, device=device)


def same(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(ours(x), theirs(x), **CLOSE)
    for name, tensor in theirs.named_buffers():
        torch.testing.assert_close(dict(ours.named_buffers())[name], tensor, **CLOSE)


@pytest.mark.parametrize("momentum", [0.1, None, 0.0, 1.0])
@pytest.mark.parametrize(
    "change",
    [
        lambda bn: None,
        lambda bn: bn.eval(),
        lambda bn: setattr(bn, "weight", None) or setattr(bn, "bias", None),
        lambda bn: setattr(bn, "bias", None),
        lambda bn: setattr(bn, "track_running_stats", False),
        lambda bn: setattr(bn, "num_batches_tracked", None),
        lambda bn: [setattr(bn, name, None) for name in ("running_mean", "running_var")],
        lambda bn: setattr(bn, "eps", 0.5),
        lambda bn: setattr(bn, "running_var", None),
    ],
    ids="none eval no_affine no_bias untracked uncounted no_statistics eps one_statistic".split(),
)
def test_options_of_the_batch_norm(momentum, change, device: torch.device) -> None:
    ours = pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, 2.0, momentum=momentum, device=device)
    theirs = copy.deepcopy(ours.to_torch())
    for module in (ours, theirs):
        change(module.bn)
    if (ours.bn.running_mean is None) != (ours.bn.running_var is None):
        for module in (ours, theirs):
            with pytest.raises(RuntimeError):
                module.eval()(draw(3, 4, 7, 8, device=device))
        return
    for step in range(4):
        if step == 2:
            ours.train(not ours.training)
            theirs.train(ours.training)
        same(ours, theirs, draw(3, 4, 7, 8, device=device, seed=step) + step)


SCALES = [
    2.0,
    3,
    float("inf"),
    torch.tensor(0.5),
    torch.rand(6, 1, 1),
    nn.Parameter(torch.rand(6, 1, 1)),
    nn.Parameter(torch.tensor(1.5)),
    torch.rand(1, 1, 1),
    torch.rand(1),
    torch.rand(1, 6, 1, 1),  # what follows runs as the chain
    torch.rand(5, 6),
    nn.Parameter(torch.rand(3, 1, 5, 6)),
    torch.rand(2, 1, 1, 1, 1),
]


@pytest.mark.parametrize("scale", SCALES, ids=lambda one: str(getattr(one, "shape", one)))
@pytest.mark.parametrize("training", [True, False])
def test_scales(scale, training: bool, device: torch.device) -> None:
    ours = pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, copy.deepcopy(scale)).to(device).train(training)
    keys = [*ours.conv.state_dict(prefix="conv."), *ours.bn.state_dict(prefix="bn.")]
    learned = ["scaling_factor"] if isinstance(scale, nn.Parameter) else []
    assert sorted(ours.state_dict()) == sorted(keys + learned)
    same(ours, copy.deepcopy(ours.to_torch()), draw(3, 4, 7, 8, device=device))


def test_a_scale_may_be_assigned() -> None:
    ours, x = pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, 2.0).eval(), draw(3, 4, 7, 8)
    for scale in (3.0, float("nan"), torch.rand(6, 1, 1), nn.Parameter(torch.rand(6, 1, 1))):
        ours.scaling_factor = scale
        theirs = ours.to_torch()(x)
        assert torch.equal(ours(x).nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1, "groups": 2, "bias": False}])
def test_geometry_and_layouts(layout, options, device: torch.device) -> None:
    steps = (pcf.relu(), pcf.add(nn.Parameter(torch.rand(6, 1, 1))))
    ours = pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, 2.0, epilogue=steps, **options).to(device)
    theirs = copy.deepcopy(ours.to_torch())
    x = draw(3, 4, 8, 7, device=device).to(memory_format=layout)
    same(ours, theirs, x)
    assert ours(x).stride() == theirs(x).stride()
    assert "epilogue.1.weight" in ours.state_dict()


def test_what_the_chain_does_with_odd_inputs(device: torch.device) -> None:
    ours = pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, 2.0, device=device)
    theirs = copy.deepcopy(ours.to_torch())
    empty = torch.empty(0, 4, 7, 8, device=device)
    assert ours(empty).shape == theirs(empty).shape
    for x, kind in (
        (torch.ones(4, 7, 8), ValueError),
        (torch.ones(1, 4, 3, 3), ValueError),
        (torch.ones(2, 5, 7, 8), RuntimeError),
        (torch.ones(2, 4, 7, 2), RuntimeError),
        ([1.0], TypeError),
    ):
        given = x.to(device) if isinstance(x, Tensor) else x
        for module in (ours, theirs):
            with pytest.raises(kind):
                module(given)
    assert int(ours.bn.num_batches_tracked) == 1


@pytest.mark.parametrize("child", ["conv", "bn"])
def test_hooks_and_other_children_run_the_chain(child: str, device: torch.device) -> None:
    ours = pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, 2.0, device=device)
    theirs, seen = copy.deepcopy(ours.to_torch()), []
    handle = getattr(ours, child).register_forward_hook(lambda *_: seen.append(child))
    same(ours, theirs, draw(3, 4, 7, 8, device=device))
    assert seen == [child]
    handle.remove()
    setattr(ours, child, nn.Sequential(getattr(ours, child)))
    torch.testing.assert_close(
        ours(draw(3, 4, 7, 8, device=device)), theirs(draw(3, 4, 7, 8, device=device)), **CLOSE
    )
    assert len(pcf.counters()["fallback"]) >= 2 - (device.type == "cuda")


def test_a_refused_batch_with_hooks_changes_nothing() -> None:
    ours = pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, 2.0)
    ours.conv.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="more than 1 value"):
        ours(torch.ones(1, 4, 3, 3))
    assert int(ours.bn.num_batches_tracked) == 0


def test_from_torch() -> None:
    ours = pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, nn.Parameter(torch.rand(6, 1, 1)))
    chain = ours.to_torch().eval()
    made = pcf.nn.Conv2dBatchNorm2dScale.from_torch(chain, epilogue=(pcf.relu(),))
    assert made.scaling_factor is ours.scaling_factor
    assert not made.training
    chain.bn = nn.BatchNorm1d(6)
    with pytest.raises(TypeError, match="BatchNorm2d"):
        pcf.nn.Conv2dBatchNorm2dScale.from_torch(chain)
    del chain.scaling_factor
    chain.bn = ours.bn
    with pytest.raises(TypeError):
        pcf.nn.Conv2dBatchNorm2dScale.from_torch(chain)


def test_a_factor_that_grows_the_channels(device: torch.device) -> None:
    ours = pcf.nn.Conv2dBatchNorm2dScale(4, 1, 3, torch.rand(5, 1, 1)).to(device)
    same(ours, copy.deepcopy(ours.to_torch()), draw(3, 4, 7, 8, device=device))


@pytest.mark.parametrize("persistent", [True, False])
def test_a_factor_stays_the_buffer_that_it_was(persistent: bool) -> None:
    chain = pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, 2.0).to_torch()
    del chain.scaling_factor
    chain.register_buffer("scaling_factor", torch.rand(6, 1, 1), persistent)
    ours = pcf.nn.Conv2dBatchNorm2dScale.from_torch(chain)
    ours.load_state_dict(chain.state_dict())
    ours.scaling_factor = torch.rand(6, 1, 1)
    back = ours.to_torch()
    assert ours.state_dict().keys() == back.state_dict().keys() == chain.state_dict().keys()
    assert back.double().scaling_factor.dtype is torch.float64


FACTORS = {
    "number": lambda: 3.0,
    "tensor": lambda: torch.rand(4, 1, 1),
    "parameter": lambda: nn.Parameter(torch.rand(4, 1, 1)),
}


@pytest.mark.parametrize("first", FACTORS)
@pytest.mark.parametrize("then", FACTORS)
def test_a_factor_of_another_kind_may_be_assigned(first: str, then: str) -> None:
    layer = pcf.nn.Conv2dBatchNorm2dScale(3, 4, 3, FACTORS[first]()).eval()
    x, factor = torch.rand(2, 3, 5, 6), FACTORS[then]()
    layer(x)
    layer.scaling_factor = factor
    assert layer.scaling_factor is factor
    torch.testing.assert_close(layer(x), layer.bn(layer.conv(x)) * factor)
    assert ("scaling_factor" in layer.state_dict()) == (then == "parameter")
    assert ("scaling_factor" in dict(layer.named_parameters())) == (then == "parameter")
    assert isinstance(layer.double().scaling_factor, float) == (then == "number")
    assert then == "number" or layer.scaling_factor.dtype is torch.float64
