"""1x1 convolutions as matrix products of pixels: exact, accurate, and within their memory."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse._loader import native
from pycutfuse.testing import (
    exact_promotion,
    forced_conv_policy,
    generate,
    guarded,
    integers,
    kinds,
)
from pycutfuse.testing.forcing import Kind

from ..cases.conv import KINDS, ConvCase, laid_out
from .conv_common import bound_of, check, torch_conv, wide

pytestmark = pytest.mark.cuda
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)

CASES = [
    ConvCase(64, 256, (1, 1), (14, 13), 3),
    ConvCase(136, 40, (1, 1), (7, 9), 5, bias=False),
    ConvCase(72, 200, (1, 1), (5, 3), 1),
    ConvCase(1024, 67, (1, 1), (9, 8), 2),
    ConvCase(256, 100, (1, 1), (1, 1), 129),
    ConvCase(64, 12, (1, 1), (31, 17), 2),  # few columns
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(autouse=True)
def by_pixels() -> Iterator[None]:
    with forced_conv_policy(native().binding.ConvPolicy(0)):
        yield


def drawn(case: ConvCase, kind: Kind, draw=None) -> tuple[Tensor, Tensor, Tensor | None]:
    def randn(shape: tuple[int, ...], seed: int) -> Tensor:
        return generate("randn", shape, seed=seed)

    return case.draw(draw or randn, layout="channels_last", device="cuda", dtype=kind[0])


def whole(shape: tuple[int, ...], seed: int) -> Tensor:
    return integers(shape, seed=seed)


@every_kind
@every_case
def test_whole_numbers_are_exact(kind: Kind, case: ConvCase, fused: None) -> None:
    tensors = drawn(case, kind, whole)
    value = case.theirs(*wide(tensors))
    full = whole(value.shape, 4).to("cuda", kind[0])
    for residual in (full, laid_out(full, "channels_last")):
        with exact_promotion(), guarded():
            steps = (pcf.add(residual), pcf.relu())
            result = case.ours(*tensors, epilogue=steps, precision=kind[1])
        assert torch.equal(result, (value + full.double()).relu().to(kind[0]))
        assert result.stride() == case.theirs(*tensors).stride()


@every_kind
@every_case
def test_accuracy(kind: Kind, case: ConvCase, fused: None) -> None:
    tensors = drawn(case, kind)
    result = case.ours(*tensors, precision=kind[1])
    exact, bound = case.theirs(*wide(tensors)), bound_of(case, *tensors)
    check(result, torch_conv(case, *tensors, tier=kind[1]), exact, kind, bound)


@every_kind
@pytest.mark.parametrize("training", [True, False])
@every_case
def test_batch_norm(kind: Kind, training: bool, case: ConvCase, fused: None) -> None:
    if case.batch is None:
        case = ConvCase(case.channels, case.out_channels, (1, 1), case.size, 1)
    tensors, features = drawn(case, kind), case.out_channels
    mean, var = generate("randn", (features,), seed=5), generate("rand", (features,), seed=6) + 0.5
    ours, theirs, exact = ([one.cuda() for one in (mean, var)] for _ in range(3))
    with guarded():
        result = pcf.ops.conv2d_batch_norm(
            *tensors,
            running_mean=ours[0],
            running_var=ours[1],
            training=training,
            precision=kind[1],
        )
    exact = [one.double() for one in exact]
    expected = F.batch_norm(case.theirs(*wide(tensors)), *exact, training=training)
    value = torch_conv(case, *tensors, tier=kind[1])
    check(result, F.batch_norm(value, *theirs, training=training), expected, kind)
    for own, other, value in zip(ours, theirs, exact, strict=True):
        check(own, other, value, kind)


@every_kind
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@every_case
def test_non_finite_values_stay_in_their_pixel(kind: Kind, bad: float, case, fused: None) -> None:
    x, weight, bias = drawn(case, kind)
    for at in (0, -1):
        spoilt = x.clone()
        spoilt[(at,) * x.dim()] = bad
        ours = case.ours(spoilt, weight, bias, precision=kind[1])
        assert torch.equal(kinds(ours), kinds(case.theirs(*wide((spoilt, weight, bias)))))
        spoilt = weight.clone()
        spoilt[at, at] = bad
        ours = case.ours(x, spoilt, bias, precision=kind[1])
        assert torch.equal(kinds(ours), kinds(case.theirs(*wide((x, spoilt, bias)))))


@every_kind
def test_channels_of_a_larger_tensor_at_any_address(kind: Kind, fused: None) -> None:
    case = CASES[0]
    x, weight, bias = drawn(case, kind)
    expected = case.ours(x, weight, bias, precision=kind[1])
    for first, shift in ((0, 0), (16, 0), (5, 0), (0, 1)):
        arena = x.new_full((x.numel() * 2 + shift,), float("nan"))
        wider = arena[shift:].view(*x.movedim(1, -1).shape[:-1], 128).movedim(-1, 1)
        part = wider[:, first : first + 64].copy_(x)
        assert torch.equal(case.ours(part, weight, bias, precision=kind[1]), expected)


@every_kind
def test_frozen_and_captured(kind: Kind, fused: None) -> None:
    layer = pcf.nn.Conv2d(64, 96, 1, device="cuda", dtype=kind[0], precision=kind[1]).eval()
    x = laid_out(generate("randn", (3, 64, 14, 13), seed=1), "channels_last").to("cuda", kind[0])
    with torch.no_grad():
        expected = layer(x)
        pcf.freeze(layer)
        assert torch.equal(layer(x), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = layer(x)
        for seed in (2, 3):
            x.copy_(generate("randn", x.shape, seed=seed))
            graph.replay()
            assert torch.equal(result, layer(x))


@pytest.mark.parametrize("tier", ["ieee", "tf32"])
def test_transposed(tier: str, fused: None) -> None:
    case, kind = ConvCase(128, 64, (1, 1), (9, 8), 2, transposed=True), (torch.float32, tier)
    tensors = drawn(case, kind)
    exact, bound = case.theirs(*wide(tensors)), bound_of(case, *tensors)
    theirs = torch_conv(case, *tensors, tier=tier)
    check(case.ours(*tensors, precision=tier), theirs, exact, kind, bound)
