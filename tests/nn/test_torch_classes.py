"""Modules that stand in for one of torch are instances of its class, with their own forward."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils import parametrizations, spectral_norm

import pycutfuse as pcf

KINDS = {
    "linear": (nn.Linear, lambda home, **more: home.Linear(6, 4, **more)),
    "conv": (nn.Conv2d, lambda home, **more: home.Conv2d(6, 4, 3, **more)),
    "transposed": (nn.ConvTranspose2d, lambda home, **more: home.ConvTranspose2d(6, 4, 3, **more)),
}


def pair(kind: str) -> tuple[nn.Module, nn.Module]:
    made = []
    for home in (pcf.nn, nn):
        torch.manual_seed(1)
        made.append(KINDS[kind][1](home))
    return made[0], made[1]


def batch(kind: str) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.rand(5, 6) if kind == "linear" else torch.rand(2, 6, 5, 7)


@pytest.mark.parametrize("kind", KINDS)
def test_instances(kind: str) -> None:
    layer = KINDS[kind][1](pcf.nn, epilogue=(pcf.relu(),))
    for made in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(made, KINDS[kind][0])
        assert torch.equal(made(batch(kind)), layer(batch(kind)))
        assert made(batch(kind)).min() >= 0
    assert not isinstance(layer.to_torch()[0], type(layer))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, spectral_norm])
def test_spectral_norm_normalises_as_of_torch(kind: str, norm) -> None:
    results = []
    for layer in pair(kind):
        torch.manual_seed(3)
        norm(layer)
        layer(batch(kind))
        results.append((layer.weight, layer.eval()(batch(kind))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_initialisers_find_them() -> None:
    def initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.constant_(module.weight, 0.5)

    for kind in KINDS:
        layer = nn.Sequential(KINDS[kind][1](pcf.nn)).apply(initialise)[0]
        assert bool((layer.weight == 0.5).all())


def test_from_torch_refuses_them() -> None:
    for kind in KINDS:
        layer = KINDS[kind][1](pcf.nn, epilogue=(pcf.relu(),))
        with pytest.raises(TypeError, match="must be a plain"):
            type(layer).from_torch(layer)
    norm = pcf.nn.LinearScaleBatchNorm1d(6, 4, (4,))
    norm.gemm = KINDS["linear"][1](pcf.nn, epilogue=(pcf.relu(),))
    with pytest.raises(TypeError, match="must be a plain"):
        pcf.nn.LinearScaleBatchNorm1d.from_torch(norm)
    x = batch("linear")
    torch.testing.assert_close(norm(x), copy.deepcopy(norm.to_torch())(x))


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_program_there_are_no_children(kind: str) -> None:
    for layer in pair(kind):
        assert list(layer.modules()) == [layer]
        assert list(copy.deepcopy(layer).children()) == []


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """This process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_tensor_parallelism_shards_a_linear_layer(style, mesh: DeviceMesh) -> None:
    results = []
    for layer in pair("linear"):
        parallelize_module(layer, mesh, style(output_layouts=Replicate()))
        result = layer(batch("linear"))
        result.sum().backward()
        results.append((result, layer.weight.grad.full_tensor()))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_graph_keeps_the_program(kind: str) -> None:
    torch._dynamo.reset()
    layer = KINDS[kind][1](pcf.nn, epilogue=(pcf.relu(),))
    compiled = torch.compile(nn.Sequential(layer), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(batch(kind)), layer(batch(kind)))
