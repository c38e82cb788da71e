"""Implicit GEMMs: exact, accurate, and within their memory, from and to both layouts."""

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
every_layout = pytest.mark.parametrize("layout", ["contiguous", "channels_last"])

CASES = [
    ConvCase(64, 72, (3, 3), (14, 13), 3, padding=1),
    ConvCase(136, 40, (3, 2), (9, 11), 5, stride=2, padding=(1, 0), bias=False),
    ConvCase(24, 200, (3, 3), (7, 7), None, dilation=2, padding=2),
    ConvCase(96, 67, (1, 1), (15, 8), 2, stride=(2, 3)),
    ConvCase(72, 130, (3, 3), (3, 3), 129),  # results of one pixel
    ConvCase(16, 300, (5, 5), (13, 12), 3, padding="same"),
    ConvCase(96, 48, (4, 3), (10, 9), 2, transposed=True, padding=1),
    # Filters longer than what threads keep of them, packed by a warp and by a block.
    ConvCase(1000, 40, (1, 1), (8, 9), 2, stride=2),
    ConvCase(712, 24, (3, 3), (5, 4), 2),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(autouse=True)
def gathered() -> Iterator[None]:
    binding = native().binding
    with forced_conv_policy(binding.ConvPolicy(0, gemm=binding.GemmPolicy(0, 0, source=1))):
        yield


def drawn(case: ConvCase, kind: Kind, layout: str, draw=None) -> tuple[Tensor, ...]:
    def randn(shape: tuple[int, ...], seed: int) -> Tensor:
        return generate("randn", shape, seed=seed)

    return case.draw(draw or randn, layout=layout, device="cuda", dtype=kind[0])


def whole(shape: tuple[int, ...], seed: int) -> Tensor:
    return integers(shape, seed=seed)


@every_kind
@every_layout
@every_case
def test_whole_numbers_are_exact(kind: Kind, layout: str, case: ConvCase, fused: None) -> None:
    tensors = drawn(case, kind, layout, whole)
    value = case.theirs(*wide(tensors))
    full = whole(value.shape, 4).to("cuda", kind[0])
    for residual in (full, laid_out(full, "channels_last")):
        with exact_promotion(), guarded():
            steps = (pcf.add(residual), pcf.relu())
            result = case.ours(*tensors, epilogue=steps, precision=kind[1])
        assert torch.equal(result, (value + full.double()).relu().to(kind[0]))
        assert result.stride() == case.theirs(*tensors).stride()


@every_kind
@every_layout
@pytest.mark.parametrize("draw", ["randn", "rand", "lognormal"])
@every_case
def test_accuracy(kind: Kind, layout: str, draw: str, case: ConvCase, fused: None) -> None:
    tensors = drawn(case, kind, layout, lambda shape, seed: generate(draw, shape, seed=seed))
    result = case.ours(*tensors, precision=kind[1])
    exact, bound = case.theirs(*wide(tensors)), bound_of(case, *tensors)
    check(result, torch_conv(case, *tensors, tier=kind[1]), exact, kind, bound)


@every_kind
@every_layout
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_batch_norm(
    kind: Kind, layout: str, training: bool, residual: bool, case: ConvCase, fused: None
) -> None:
    tensors, features = drawn(case, kind, layout), case.out_channels
    mean, var = generate("randn", (features,), seed=5), generate("rand", (features,), seed=6) + 0.5
    ours, theirs, exact = ([one.cuda() for one in (mean, var)] for _ in range(3))
    exact = [one.double() for one in exact]
    value = F.batch_norm(case.theirs(*wide(tensors)), *exact, training=training)
    beside = generate("randn", tuple(value.shape), seed=7).to("cuda", kind[0]) if residual else None
    with guarded():
        result = pcf.ops.conv2d_batch_norm(
            *tensors,
            stride=case.stride,
            padding=case.padding,
            running_mean=ours[0],
            running_var=ours[1],
            training=training,
            after=() if beside is None else (pcf.add(beside), pcf.relu()),
            precision=kind[1],
        )
    plain = F.batch_norm(torch_conv(case, *tensors, tier=kind[1]), *theirs, training=training)
    if beside is not None:
        value, plain = (value + beside.double()).relu(), (plain + beside).relu()
    check(result, plain, value, kind)
    for own, other, wanted in zip(ours, theirs, exact, strict=True):
        check(own, other, wanted, kind)


@every_kind
@every_layout
def test_scales_that_samples_of_an_image_miss(kind: Kind, layout: str, fused: None) -> None:
    """The last elements of an image are not among those that its scale is guessed from."""
    case = CASES[0]
    x, weight, _ = drawn(case, kind, layout, whole)
    x[0, -1, -1, -1] = 2.0**10
    x[1] = 0
    x[2] = 0
    x[2, -1, -1, -3:] = 1
    with exact_promotion(), guarded():
        result = case.ours(x, weight, None, precision=kind[1])
    assert torch.equal(result, case.theirs(*wide((x, weight, None))).to(kind[0]))


@every_kind
@every_layout
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@every_case
def test_non_finite_values_stay_where_they_are_met(
    kind: Kind, layout: str, bad: float, case: ConvCase, fused: None
) -> None:
    x, weight, bias = drawn(case, kind, layout)
    for at in (0, -1):
        spoilt = x.clone()
        spoilt[(at,) * x.dim()] = bad
        ours = case.ours(spoilt, weight, bias, precision=kind[1])
        assert torch.equal(kinds(ours), kinds(case.theirs(*wide((spoilt, weight, bias)))))


@every_kind
@every_layout
def test_images_of_unlike_magnitudes(kind: Kind, layout: str, fused: None) -> None:
    """Each has a scale of its own."""
    case = CASES[0]
    x, weight, bias = drawn(case, kind, layout)
    expected = case.ours(x, weight, precision=kind[1])
    low = -2 if kind[0] is torch.float16 else -12  # whose small values lose bits below
    powers = torch.tensor([2.0**low, 1.0, 2.0**3], device="cuda", dtype=kind[0]).view(3, 1, 1, 1)
    assert torch.equal(case.ours(x * powers, weight, precision=kind[1]), expected * powers)
    assert bias is not None


@every_kind
@every_layout
def test_parts_of_a_larger_tensor_at_any_address(kind: Kind, layout: str, fused: None) -> None:
    case = CASES[0]
    x, weight, bias = drawn(case, kind, layout)
    expected = case.ours(x, weight, bias, precision=kind[1])
    for first, shift in ((0, 0), (16, 0), (5, 0), (0, 1)):
        arena = x.new_full((x.numel() * 2 + shift,), float("nan"))
        wider = arena[shift:].view(*x.movedim(1, -1).shape[:-1], 128).movedim(-1, 1)
        part = wider[:, first : first + 64].copy_(x)
        for factor in (weight, laid_out(weight, "gapped")):
            assert torch.equal(case.ours(part, factor, bias, precision=kind[1]), expected)


@every_kind
@every_layout
def test_frozen_and_captured(kind: Kind, layout: str, fused: None) -> None:
    layer = pcf.nn.Conv2d(64, 96, 3, padding=1, device="cuda", dtype=kind[0], precision=kind[1])
    x = laid_out(generate("randn", (3, 64, 14, 13), seed=1), layout).to("cuda", kind[0])
    with torch.no_grad():
        expected = layer.eval()(x)
        pcf.freeze(layer)
        assert torch.equal(layer(x), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = layer(x)
        for seed in (2, 3):
            x.copy_(generate("randn", x.shape, seed=seed))
            graph.replay()
            assert torch.equal(result, layer(x))
