"""Convolution kernels write all of their output, nothing else, and replay in graphs."""

import pytest
import torch
from torch import Tensor

import pycutfuse as pcf
from pycutfuse.testing import generate, guarded
from pycutfuse.testing.forcing import Kind

from ..cases.conv import KERNEL, KINDS, LAYOUTS, ConvCase

pytestmark = pytest.mark.cuda

# Relative to the result's norm.
CLOSE = dict(zip(KINDS, (1e-5, 1e-2, 1e-2, 1e-2), strict=True))


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return generate("randn", shape, seed=seed)


def near(result: Tensor, expected: Tensor, kind: Kind) -> None:
    assert bool(result.isfinite().all())
    assert float((result.double() - expected).norm() / expected.norm()) < CLOSE[kind]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", KERNEL, ids=str)
def test_memory_of_convolutions(kind: Kind, layout: str, case: ConvCase, fused: None) -> None:
    x, weight, bias = case.draw(draw, layout=layout, device="cuda", dtype=kind[0])
    value = case.theirs(*(None if one is None else one.double() for one in (x, weight, bias)))
    with guarded():
        result = case.ours(x, weight, bias, precision=kind[1])
    near(result, value, kind)
    if "channels_last" in layout:
        return
    full = draw(value.shape, 5).to("cuda", kind[0])
    with guarded():
        result = case.ours(x, weight, bias, precision=kind[1], epilogue=(pcf.add(full),))
    near(result, value + full, kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", [one for one in KERNEL if not one.transposed], ids=str)
def test_memory_of_batch_norm(
    kind: Kind, training: bool, layout: str, case: ConvCase, fused: None
) -> None:
    tensors = case.draw(draw, layout=layout, device="cuda", dtype=kind[0])
    k = case.out_channels
    mean, var = torch.zeros(k, device="cuda"), torch.ones(k, device="cuda")
    with guarded():
        result = pcf.ops.conv2d_batch_norm(
            *tensors,
            **case.options,
            running_mean=mean,
            running_var=var,
            training=training,
            precision=kind[1],
        )
    z = case.theirs(*(None if one is None else one.double() for one in tensors))
    pair = (None, None) if training else (mean.double(), var.double())
    expected = torch.nn.functional.batch_norm(z, *pair, training=training)
    assert bool(result.isfinite().all())
    assert float((result.double() - expected).norm() / expected.norm()) < 10 * CLOSE[kind]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("case", [KERNEL[at] for at in (0, 1, 2, 11, 15)], ids=str)
def test_graphs_see_new_values(kind: Kind, case: ConvCase, fused: None) -> None:
    """Of x and weight, from magnitudes that the captured call did not see."""
    x, weight, bias = case.draw(draw, device="cuda", dtype=kind[0])
    case.ours(x, weight, bias, precision=kind[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = case.ours(x, weight, bias, precision=kind[1])
    for factor in (1.0, 2.0**-8, 2.0**5):
        x.copy_(draw(x.shape, 7) * factor)
        weight.copy_(draw(weight.shape, 8))
        graph.replay()
        assert torch.equal(result, case.ours(x, weight, bias, precision=kind[1]))


@pytest.mark.parametrize("training", [True, False])
def test_graphs_of_batch_norm_count_batches(training: bool, fused: None) -> None:
    layer = pcf.nn.Conv2dBatchNorm2dScale(8, 64, 3, 2.0, device="cuda", momentum=None)
    twin = pcf.nn.Conv2dBatchNorm2dScale(8, 64, 3, 2.0, device="cuda", momentum=None)
    layer.train(training)
    twin.train(training)
    x = draw((4, 8, 34, 35), 1).cuda()
    with torch.no_grad():
        layer(x)
        twin.load_state_dict(layer.state_dict())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = layer(x)
        for step in range(3):
            x.copy_(draw(x.shape, step) + step)
            graph.replay()
            assert torch.equal(result, twin(x))
    for name, buffer in layer.bn.named_buffers():
        assert torch.equal(buffer, dict(twin.bn.named_buffers())[name])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_streams_and_offset_addresses(kind: Kind, fused: None) -> None:
    case = KERNEL[3]
    x, weight, bias = case.draw(draw, device="cuda", dtype=kind[0])
    expected = case.ours(x, weight, bias, precision=kind[1])
    torch.cuda.synchronize()
    for shift in (1, 3):
        arena = x.new_full((x.numel() + shift,), float("nan"))
        moved = arena[shift:].view(x.shape).copy_(x)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result = case.ours(moved, weight, bias, precision=kind[1])
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(result, expected)
