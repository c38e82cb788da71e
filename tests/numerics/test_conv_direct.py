"""Direct kernels: exact, accurate, and within their memory, from and to both layouts."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse._loader import native
from pycutfuse.testing import forced_conv_policy, generate, guarded, integers, kinds
from pycutfuse.testing.forcing import Kind

from ..cases.conv import KINDS, ConvCase, laid_out
from ..cases.direct import DIRECT, OTHERS, WINDOWS
from .conv_common import bound_of, check, torch_conv, wide

pytestmark = pytest.mark.cuda
SELECTED, ANY = 1, 2

every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
every_layout = pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gapped"])
both_layouts = pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
# Of the size that networks have: many blocks of every kernel, all of them full.
LARGE = [
    ConvCase(96, 96, (3, 3), (56, 56), 8, padding=1, groups=96),
    ConvCase(72, 72, (5, 5), (57, 60), 4, padding=2, stride=2, groups=72),
    ConvCase(64, 64, (7, 7), (28, 29), 8, padding=3, groups=64),
    ConvCase(64, 128, (3, 3), (112, 40), 3, padding=1, groups=16),
    ConvCase(40, 40, (4, 4), (28, 28), 4, padding=1, stride=2, groups=40, transposed=True),
]
every_case = pytest.mark.parametrize(
    ("direct", "case"),
    [(SELECTED, case) for case in DIRECT + LARGE] + [(ANY, case) for case in WINDOWS + LARGE],
    ids=str,
)


def forced(direct: int) -> object:
    return forced_conv_policy(native().binding.ConvPolicy(0, direct=direct))


@pytest.fixture(autouse=True)
def directly() -> Iterator[None]:
    with forced(SELECTED):
        yield


def whole(shape: tuple[int, ...], seed: int) -> Tensor:
    return integers(shape, seed=seed)


def randn(shape: tuple[int, ...], seed: int) -> Tensor:
    return generate("randn", shape, seed=seed)


def drawn(case: ConvCase, kind: Kind, layout: str, make=randn) -> tuple[Tensor, ...]:
    return case.draw(make, layout=layout, device="cuda", dtype=kind[0])


@every_kind
@every_layout
@every_case
def test_whole_numbers_are_exact(direct, kind: Kind, layout: str, case, fused: None) -> None:
    tensors = drawn(case, kind, layout, whole)
    value = case.theirs(*wide(tensors))
    row = whole((value.shape[-1],), 5).to("cuda", kind[0])
    full = whole(value.shape, 4).to("cuda", kind[0])
    for residual in (full, laid_out(full, "channels_last")):
        with forced(direct), guarded():
            steps = (pcf.add(residual), pcf.add(row), pcf.relu())
            result = case.ours(*tensors, epilogue=steps, precision=kind[1])
        exact = (value + full.double() + row.double()).relu()
        assert torch.equal(result, exact.to(kind[0]))
        if layout != "gapped":
            assert result.stride() == case.theirs(*tensors).stride()


@every_kind
@both_layouts
@pytest.mark.parametrize("draw", ["randn", "rand", "lognormal"])
@every_case
def test_accuracy(direct, kind: Kind, layout: str, draw: str, case, fused: None) -> None:
    tensors = drawn(case, kind, layout, lambda shape, seed: generate(draw, shape, seed=seed))
    with forced(direct):
        result = case.ours(*tensors, precision=kind[1])
    exact, bound = case.theirs(*wide(tensors)), bound_of(case, *tensors)
    check(result, torch_conv(case, *tensors, tier=kind[1]), exact, kind, bound)


@every_kind
@both_layouts
@pytest.mark.parametrize("case", [*WINDOWS[:6], OTHERS[2], LARGE[0]], ids=str)
def test_batch_norm_in_eval(kind: Kind, layout: str, case: ConvCase, fused: None) -> None:
    tensors = drawn(case, kind, layout)
    if tensors[0].dim() == 3:
        tensors = tensors[0][None], *tensors[1:]
    features = (case.out_channels,)
    mean, var = (one.cuda() for one in (randn(features, 5), generate("rand", features, seed=6)))
    var += 0.5
    with guarded():
        result = pcf.ops.conv2d_batch_norm(
            *tensors,
            **case.options,
            running_mean=mean,
            running_var=var,
            training=False,
            precision=kind[1],
        )
    expected = F.batch_norm(case.theirs(*wide(tensors)), mean.double(), var.double())
    value = torch_conv(case, *tensors, tier=kind[1])
    check(result, F.batch_norm(value, mean, var), expected, kind)


@every_kind
@both_layouts
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@every_case
def test_non_finite_values_stay_where_they_are_met(
    direct: int, kind: Kind, layout: str, bad: float, case: ConvCase, fused: None
) -> None:
    x, weight, bias = drawn(case, kind, layout)
    with forced(direct):
        for at in (0, -1):
            spoilt = x.clone()
            spoilt[(at,) * x.dim()] = bad
            ours = case.ours(spoilt, weight, bias, precision=kind[1])
            exact = case.theirs(*wide((x, weight, bias)))
            met = case.theirs(*wide((spoilt, weight, bias)))
            assert torch.equal(kinds(ours), kinds(met))
            same = met == exact
            torch.testing.assert_close(
                ours.double()[same], exact[same], rtol=2e-2, atol=2e-2, check_dtype=False
            )


@every_kind
@both_layouts
@pytest.mark.parametrize("direct", [SELECTED, ANY])
@pytest.mark.parametrize("case", [WINDOWS[2], LARGE[0], LARGE[3]], ids=str)
def test_padding_is_no_factor(direct: int, kind: Kind, layout: str, case, fused: None) -> None:
    x, weight, bias = drawn(case, kind, layout)
    spoilt, tap = weight.clone(), torch.zeros_like(weight)
    spoilt[0, 0, 0, 0], tap[0, 0, 0, 0] = float("inf"), 1.0
    with forced(direct):
        ours = case.ours(x, spoilt, bias, precision=kind[1])
    finite = case.theirs(*wide((x, torch.where(tap > 0, 0.0, spoilt), bias)))
    met = case.theirs(*wide((x, tap, None)))
    inside = case.theirs(*wide((torch.ones_like(x), tap, None))) > 0
    expected = torch.where(inside, finite + met * float("inf"), finite)
    assert torch.equal(kinds(ours), kinds(expected))


@every_kind
@both_layouts
@pytest.mark.parametrize("shift", [0, 1, 2, 4])
def test_parts_of_a_larger_tensor_at_any_address(
    kind: Kind, layout: str, shift: int, fused: None
) -> None:
    for case in (WINDOWS[2], LARGE[0]):
        x, weight, bias = drawn(case, kind, layout)
        expected = case.ours(x, weight, bias, precision=kind[1])
        arena = x.new_full((2 * x.numel() + shift,), float("nan"))
        n, c, h, w = x.shape
        shape = (n, 2 * c, h, w) if layout == "contiguous" else (n, h, w, 2 * c)
        wider = arena[shift:].view(shape)
        wider = wider if layout == "contiguous" else wider.movedim(-1, 1)
        for first in (0, 3):
            part = wider[:, first : first + c].copy_(x)
            assert torch.equal(case.ours(part, weight, bias, precision=kind[1]), expected)


@every_kind
@both_layouts
def test_frozen_and_captured(kind: Kind, layout: str, fused: None) -> None:
    options = {"device": "cuda", "dtype": kind[0], "precision": kind[1]}
    layer = pcf.nn.Conv2d(64, 64, 3, padding=1, groups=64, **options)
    x = laid_out(randn((3, 64, 14, 13), 1), layout).to("cuda", kind[0])
    with torch.no_grad():
        expected = layer.eval()(x)
        pcf.freeze(layer)
        assert torch.equal(layer(x), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = layer(x)
        for seed in (2, 3):
            x.copy_(randn(x.shape, seed))
            graph.replay()
            assert torch.equal(result, layer(x))


def test_more_than_2_31_elements(fused: None) -> None:
    """Of x and of the result, in both layouts."""
    case, kind = ConvCase(32, 32, (3, 3), (256, 256), 1100, padding=1, groups=32), KINDS[2]
    weight = whole((32, 1, 3, 3), 2).to("cuda", kind[0])
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.zeros((1100, 32, 256, 256), device="cuda", dtype=kind[0])
        x = x.contiguous(memory_format=memory_format)
        last = whole((4, 32, 256, 256), 1).to("cuda", kind[0])
        x[-4:] = last
        result = case.ours(x, weight, precision=kind[1])
        assert torch.equal(result[-4:], case.theirs(last.double(), weight.double()).to(kind[0]))
        assert not result[:-4].any()
        del x, result
