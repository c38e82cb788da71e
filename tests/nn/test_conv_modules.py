"""Modules of convolutions stand in for torch's: draws, keys, settings, hooks, padding modes."""

import copy
import importlib.util
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import pycutfuse as pcf
from pycutfuse.testing import generate

from ..cases.conv import FEW, ConvCase

PROBLEMS = Path(__file__).parents[2] / "benchmarks" / "problems"
# Convolutions on the GPU are compared at TF32's error, their default.
CLOSE = {"rtol": 2e-2, "atol": 2e-2}


def draw(*shape: int, device: torch.device | str = "cpu", seed: int = 1) -> Tensor:
    return generate("randn", shape, seed=seed, device=device)


def same_state(one: nn.Module, other: nn.Module) -> None:
    assert list(one.state_dict()) == list(other.state_dict())
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_same_seed_same_parameters_and_results(case: ConvCase, device: torch.device) -> None:
    torch.manual_seed(3)
    theirs = case.module(nn, device=device)
    after = torch.rand(1)
    torch.manual_seed(3)
    ours = case.module(pcf.nn, device=device)
    assert torch.equal(torch.rand(1), after)
    same_state(ours, theirs)
    x = draw(*(4, 9, 8) if case.batch is None else (2, 4, 9, 8), device=device)
    torch.testing.assert_close(ours(x), theirs(x), **CLOSE)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    torch.manual_seed(4)
    ours.reset_parameters()
    torch.manual_seed(4)
    theirs.reset_parameters()
    same_state(ours, theirs)
    assert repr(theirs).split("(", 1)[1].rstrip(")") in repr(ours)


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d", "conv2d_batch_norm_scale"])
def test_problems(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, PROBLEMS / f"{name}.py")
    problem = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(problem)
    models = []
    for kind in (problem.Model, problem.ModelNew):
        torch.manual_seed(5)
        models.append(kind(*problem.get_init_inputs()))
    same_state(*models)
    channels = {"conv2d": 3, "conv_transpose2d": 32}.get(name, 8)
    x = draw(2, channels, 40, 41)
    for training in (True, False):
        one, other = (model.train(training)(x) for model in models)
        assert torch.equal(one, other)
    same_state(*models)


def test_from_torch_and_back() -> None:
    steps = (pcf.mul(nn.Parameter(torch.rand(6, 1, 1))), pcf.relu())
    for case in FEW:
        source = case.module(nn).eval()
        kind = pcf.nn.ConvTranspose2d if case.transposed else pcf.nn.Conv2d
        made = kind.from_torch(source)
        assert made.weight is source.weight
        assert made.bias is source.bias
        assert not made.training
        back = made.to_torch()
        assert type(back) is type(source)
        assert repr(back) == repr(source)
        fused = kind.from_torch(source, epilogue=steps)
        x = draw(2, 4, 9, 8)
        assert torch.equal(fused(x), fused.to_torch()(x))
        assert list(fused.state_dict())[-1] == "epilogue.0.weight"
    with pytest.raises(TypeError, match="ConvTranspose2d"):
        pcf.nn.ConvTranspose2d.from_torch(nn.Conv2d(1, 1, 1))
    source = nn.Conv2d(1, 1, 1)
    source.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks"):
        pcf.nn.Conv2d.from_torch(source)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(how) -> None:
    x = draw(2, 4, 9, 8)
    for module in (ConvCase().module(pcf.nn), pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, 2.0)):
        made = how(module.eval())
        assert torch.equal(made(x), module(x))


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [2, (1, 2), "same"])
def test_padding_modes(mode: str, padding, device: torch.device) -> None:
    ours = pcf.nn.Conv2d(4, 6, 4, padding=padding, padding_mode=mode, device=device)
    theirs, x = ours.to_torch(), draw(2, 4, 9, 8, device=device)
    torch.testing.assert_close(ours(x), theirs(x), **CLOSE)
    torch.testing.assert_close(ours(x[0]), theirs(x[0]), **CLOSE)


@pytest.mark.parametrize(("mode", "limit"), [("reflect", 2), ("circular", 3)])
def test_padding_too_large_for_its_mode(mode: str, limit: int) -> None:
    ours = pcf.nn.Conv2d(4, 6, 3, padding=4, padding_mode=mode)
    x = torch.ones(2, 4, 9, 3)
    for call in (ours.to_torch(), ours):
        with pytest.raises(RuntimeError) as info:
            call(x)
    assert f"at most {limit}" in str(info.value)
    with pytest.raises(TypeError):
        ours([1.0])


def test_constructors_refuse_what_torchs_refuse() -> None:
    for options in (
        {"groups": 3},
        {"groups": 0},
        {"padding": "half"},
        {"padding": "same", "stride": 2},
        {"padding_mode": "mirror"},
    ):
        for namespace in (nn, pcf.nn):
            with pytest.raises(ValueError, match=r"\w"):
                namespace.Conv2d(4, 6, 3, **options)
    with pytest.raises(ValueError, match="zeros"):
        pcf.nn.ConvTranspose2d(4, 6, 3, padding_mode="reflect")
    with pytest.raises(ValueError, match="16 steps"):
        pcf.nn.Conv2d(4, 6, 3, epilogue=(pcf.relu(),) * 16)
    with pytest.raises(ValueError, match="precision"):
        pcf.nn.Conv2d(4, 6, 3, precision="fp8")
    with pytest.raises(NotImplementedError, match="to_torch"):
        torch.jit.script(pcf.nn.Conv2d(4, 6, 3))


def test_output_size(device: torch.device) -> None:
    ours = pcf.nn.ConvTranspose2d(4, 6, 3, stride=3, padding=1, device=device)
    theirs, x = ours.to_torch(), draw(2, 4, 5, 6, device=device)
    for size in ((13, 16), (14, 18), [2, 6, 15, 17], torch.Size((13, 18))):
        torch.testing.assert_close(ours(x, size), theirs(x, size), **CLOSE)
        torch.testing.assert_close(ours(x, output_size=size), theirs(x, size), **CLOSE)
    for size in ((12, 16), (13, 19), (13,)):
        for module in (ours, theirs):
            with pytest.raises(ValueError, match=r"\w"):
                module(x, size)


def test_assigned_settings_are_seen() -> None:
    ours, x = pcf.nn.Conv2d(4, 6, 3), draw(2, 4, 9, 8)
    norm = pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, 2.0)
    for name, value in (("stride", (2, 2)), ("padding", (1, 0)), ("dilation", (1, 2))):
        setattr(ours, name, value)
        setattr(norm.conv, name, value)
        assert torch.equal(ours(x), ours.to_torch()(x))
        assert torch.equal(norm.eval()(x), norm.to_torch()(x))


@pytest.mark.parametrize("steps", [(), (pcf.relu,)])
def test_an_assigned_padding_mode_is_refused_as_torch(steps) -> None:
    layer = pcf.nn.ConvTranspose2d(4, 6, 3, epilogue=[step() for step in steps])
    layer.padding_mode = "reflect"
    for _ in range(2):  # the second time as the plain chain, where there are steps
        with pytest.raises(ValueError, match="padding_mode is 'reflect'"):
            layer(draw(2, 4, 9, 8))
        layer.epilogue.register_forward_hook(lambda *_: None)


def test_hooks_and_parametrizations() -> None:
    x = draw(2, 4, 9, 8)
    layer = pcf.nn.Conv2d(4, 6, 3, epilogue=(pcf.relu(),))
    seen: list[object] = []
    layer.register_forward_hook(lambda *_: seen.append("module"))
    next(iter(layer.epilogue)).register_forward_hook(lambda *_: seen.append("step"))
    assert torch.equal(layer(x), layer.to_torch()(x))
    assert seen[:2] == ["step", "module"]
    layer = parametrizations.weight_norm(pcf.nn.Conv2d(4, 6, 3))
    plain = nn.functional.conv2d(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), plain)
    layer(x).sum().backward()
    assert layer.parametrizations.weight.original0.grad is not None


@pytest.mark.parametrize("kernel", [(5, 5), (3, 7), (1, 2)])
@pytest.mark.parametrize("normed", [False, True])
def test_same_padding_follows_a_weight_of_another_size(normed: bool, kernel) -> None:
    layer: nn.Module = pcf.nn.Conv2d(4, 6, 3, padding="same")
    if normed:
        layer = pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, 2.0, padding="same").eval()
    x, holder = draw(2, 4, 9, 8), layer.conv if normed else layer
    layer(x)
    holder.weight = nn.Parameter(draw(6, 4, *kernel))
    for _ in range(2):
        torch.testing.assert_close(layer(x), layer.to_torch()(x))
