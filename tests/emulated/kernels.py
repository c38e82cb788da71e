"""Kernels on the host; test_kernels.py runs this file with plugin.py."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse import support
from pycutfuse.testing import (
    exact_promotion,
    forced_conv_policy,
    generate,
    guarded,
    integers,
    kinds,
)
from pycutfuse.testing.forcing import Kind, conv_kinds_of

from ..cases.conv import KINDS, ConvCase, laid_out
from ..numerics.conv_common import bound_of, check, torch_conv, wide
from . import session
from .plugin import binding

GATHERED = binding.ConvPolicy(0, gemm=binding.GemmPolicy(0, 0, source=1))
PIXELS = binding.ConvPolicy(0)
CASES = [
    ConvCase(64, 24, (3, 3), (7, 6), 2, padding=1),
    ConvCase(72, 40, (3, 2), (9, 8), 3, stride=2, padding=(1, 0), bias=False),
    ConvCase(24, 70, (3, 3), (5, 7), None, dilation=2, padding=2),
    ConvCase(96, 67, (1, 1), (9, 8), 2, stride=(2, 3)),
    ConvCase(16, 12, (3, 3), (3, 3), 70),  # results of one pixel
    ConvCase(16, 33, (5, 4), (6, 5), 2, padding="same"),
    ConvCase(24, 16, (4, 3), (6, 5), 2, transposed=True, padding=1),
]
SHIFTED = [
    ConvCase(8, 24, (3, 3), (9, 138), 2, padding=1),
    ConvCase(3, 16, (5, 5), (23, 70), 2, stride=2, padding=2),
    ConvCase(3, 24, (7, 7), (21, 96), 2, stride=2, padding=3),  # rows of phases first
    ConvCase(32, 16, (3, 3), (9, 71), 2, groups=2, dilation=2, padding=2),
    ConvCase(16, 24, (3, 3), (7, 40), 2, transposed=True, stride=2, padding=1),
]
OF_PLANES = [ConvCase(64, 40, (1, 1), (9, 8), 2)]
IN_PLANES = [("contiguous", CASES[1]), ("contiguous", CASES[3])]  # 20 pixels, 15
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
every_layout = pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gapped"])


@pytest.fixture(autouse=True)
def gathered(fused: None) -> Iterator[None]:
    with forced_conv_policy(GATHERED):
        yield


@pytest.fixture
def architecture(request: pytest.FixtureRequest, monkeypatch, emulated: None) -> None:
    device = binding.DeviceProps(major=request.param, minor=0, sm_count=4)
    session.use_device(monkeypatch, device)


every_architecture = pytest.mark.parametrize("architecture", [8, 9], indirect=True)


def whole(shape: tuple[int, ...], seed: int) -> Tensor:
    return integers(shape, seed=seed)


def randn(shape: tuple[int, ...], seed: int) -> Tensor:
    return generate("randn", shape, seed=seed)


@every_architecture
@every_kind
@every_layout
@every_case
def test_convolutions_of_whole_numbers(
    kind: Kind, layout: str, case: ConvCase, architecture: None
) -> None:
    tensors = case.draw(whole, layout=layout, dtype=kind[0])
    value = case.theirs(*wide(tensors))
    full = whole(value.shape, 4).to(kind[0])
    for residual in (full, laid_out(full, "channels_last")):
        steps = (pcf.add(residual), pcf.relu())
        with exact_promotion(), guarded():
            result = case.ours(*tensors, epilogue=steps, precision=kind[1])
        assert torch.equal(result, (value + full.double()).relu().to(kind[0]))
        if layout != "gapped":
            assert result.stride() == case.theirs(*tensors).stride()


POLICIES = [p for p in binding.compiled_conv_policies() if not p.direct]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_convolutions_by_each_policy(policy: object) -> None:
    shifted, of_planes = policy.tile_n > 0, policy.gemm.source == 2
    taken = 0
    for kind in conv_kinds_of(policy):
        for case in SHIFTED if shifted else OF_PLANES if of_planes else CASES[1:2]:
            tensors = case.draw(whole, dtype=kind[0])
            exact = case.theirs(*wide(tensors))
            full = whole(exact.shape, 4).to(kind[0])
            with forced_conv_policy(policy), exact_promotion(), guarded():
                try:
                    result = case.ours(*tensors, epilogue=(pcf.add(full),), precision=kind[1])
                except NotImplementedError:
                    assert shifted
                    continue
            assert torch.equal(result, (exact + full.double()).to(kind[0])), str(case)
            taken += 1
    assert taken > 0


# Of channels_last: one group of eight channels, one and a half, several in groups, and phases.
IN_PIECES = [
    ConvCase(8, 24, (3, 3), (9, 64), 2, padding=1),
    ConvCase(12, 70, (3, 2), (6, 60), None, padding=(2, 1)),
    ConvCase(32, 16, (3, 3), (9, 128), 2, groups=2, padding=1),
    ConvCase(24, 40, (3, 3), (13, 128), 1, stride=2, padding=1),
    ConvCase(16, 24, (3, 3), (7, 60), 2, transposed=True),
]


@pytest.mark.parametrize("policy", [p for p in POLICIES if p.tile_n > 0], ids=repr)
def test_pieces_of_channels_last(policy: object) -> None:
    kind = next(kind for kind in conv_kinds_of(policy) if kind[0] is torch.float32)
    taken = 0
    for case in IN_PIECES:
        x, weight, bias = case.draw(whole, layout="channels_last")
        exact = case.theirs(*wide((x, weight, bias)))
        with forced_conv_policy(policy), exact_promotion(), guarded():
            try:
                problem = case.problem(kind)._replace(channels_last=True)
                plan = support.make_conv_plan(problem, policy)
            except NotImplementedError:
                continue
            result = case.ours(x, weight, bias, precision=kind[1])
        assert torch.equal(result, exact.float()), str(case)
        taken += " pieces of " in plan.describe()
    assert taken > 0


# Those whose weights may have gaps, with the layouts that they read.
GAPPED = [(p, "contiguous") for p in POLICIES if p.gemm.source != 2 or p.patch_n > 0]
GAPPED += [(p, "channels_last") for p in POLICIES if p.gemm.source != 2]


@pytest.mark.parametrize(("policy", "layout"), GAPPED, ids=repr)
def test_weights_with_gaps_at_odd_addresses(policy: object, layout: str) -> None:
    case = SHIFTED[0] if policy.tile_n > 0 else CASES[0]
    if policy.patch_n > 0:
        case = ConvCase(8, 24, (3, 3), (9, 12), 2, padding=1)
    for kind in conv_kinds_of(policy):
        x, weight, bias = case.draw(whole, layout=layout, dtype=kind[0])
        gapped = laid_out(weight, "gapped")
        with forced_conv_policy(policy), exact_promotion(), guarded():
            result = case.ours(x, gapped, bias, precision=kind[1])
        assert torch.equal(result, case.theirs(*wide((x, weight, bias))).to(kind[0])), str(kind)


@every_architecture
@every_kind
@pytest.mark.parametrize("draw", ["randn", "rand", "lognormal"])
def test_accuracy_of_convolutions(kind: Kind, draw: str, architecture: None) -> None:
    case = CASES[0]
    made = case.draw(lambda shape, seed: generate(draw, shape, seed=seed), dtype=kind[0])
    exact, bound = case.theirs(*wide(made)), bound_of(case, *made)
    check(
        case.ours(*made, precision=kind[1]),
        torch_conv(case, *made, tier=kind[1]),
        exact,
        kind,
        bound,
    )


@every_architecture
@every_kind
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[6]], ids=str)
def test_non_finite_values_stay_where_they_are_met(
    kind: Kind, layout: str, bad: float, case: ConvCase, architecture: None
) -> None:
    x, weight, bias = case.draw(randn, layout=layout, dtype=kind[0])
    for at in (0, -1):
        spoilt = x.clone()
        spoilt[(at,) * x.dim()] = bad
        theirs = case.theirs(*wide((spoilt, weight, bias)))
        ours = case.ours(spoilt, weight, bias, precision=kind[1])
        assert torch.equal(kinds(ours), kinds(theirs))
        steps = (pcf.clamp(max=2.0),)
        ours = case.ours(spoilt, weight, bias, epilogue=steps, precision=kind[1])
        assert torch.equal(kinds(ours), kinds(theirs.clamp(max=2.0)))
    if kind[0] is torch.float32:
        spoilt = weight.clone()
        spoilt[0, 0, 1, 1] = bad  # in the middle, where it meets no padding alone
        ours = kinds(case.ours(x, spoilt, bias, precision=kind[1]))
        inner = kinds(case.theirs(*wide((x, spoilt, bias))))
        assert torch.equal(ours[..., 1:-1, 1:-1], inner[..., 1:-1, 1:-1])


@every_architecture
@every_kind
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("layout", "case"), [("channels_last", CASES[0]), *IN_PLANES])
def test_batch_norm(kind: Kind, training: bool, layout: str, case, architecture: None) -> None:
    tensors, features = case.draw(randn, layout=layout, dtype=kind[0]), (case.out_channels,)
    ours = [randn(features, 5), generate("rand", features, seed=6) + 0.5]
    exact = [one.double() for one in ours]
    value = case.theirs(*wide(tensors))
    beside = randn(tuple(value.shape), 7).to(kind[0])
    result = pcf.ops.conv2d_batch_norm(
        *(*tensors, case.stride, case.padding),
        running_mean=ours[0],
        running_var=ours[1],
        training=training,
        after=(pcf.add(beside), pcf.relu()),
        precision=kind[1],
    )
    expected = (F.batch_norm(value, *exact, training=training) + beside.double()).relu()
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if kind != KINDS[0] else {"rtol": 2e-6, "atol": 2e-5}
    torch.testing.assert_close(result.double(), expected, **tolerance)
    for own, value in zip(ours, exact, strict=True):
        torch.testing.assert_close(own.double(), value, **tolerance)


@every_architecture
@every_kind
@every_layout
def test_scales_that_samples_of_an_image_miss(kind: Kind, layout: str, architecture: None) -> None:
    x, weight, _ = CASES[1].draw(whole, layout=layout, dtype=kind[0])
    x[0, -1, -1, -1], x[1:] = 2.0**10, 0
    x[2, -1, -1, -3:] = 1
    with exact_promotion(), guarded():
        result = CASES[1].ours(x, weight, None, precision=kind[1])
    assert torch.equal(result, CASES[1].theirs(*wide((x, weight, None))).to(kind[0]))


@every_architecture
@every_kind
def test_images_of_unlike_magnitudes_and_places(kind: Kind, architecture: None) -> None:
    case = CASES[0]
    x, weight, bias = case.draw(randn, layout="channels_last", dtype=kind[0])
    expected = case.ours(x, weight, precision=kind[1])
    low = -2 if kind[0] is torch.float16 else -12  # whose small values lose bits below
    powers = torch.tensor([2.0**low, 2.0**3], dtype=kind[0]).view(2, 1, 1, 1)
    assert torch.equal(case.ours(x * powers, weight, precision=kind[1]), expected * powers)
    arena = x.new_full((x.numel() * 2 + 1,), float("nan"))
    for first, shift in ((0, 0), (16, 0), (5, 0), (0, 1)):
        wider = arena[shift : shift + x.numel() * 2].view(2, 7, 6, 128).movedim(-1, 1)
        part = wider[:, first : first + 64].copy_(x)
        assert torch.equal(case.ours(part, weight, precision=kind[1]), expected)
    assert bias is not None


@every_architecture
@every_kind
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_packed_weights(kind: Kind, layout: str, architecture: None) -> None:
    """As modules that are frozen have them."""
    case = ConvCase(64, 24, (3, 3), (7, 6), 2, bias=False, padding=1)
    x, weight, _ = case.draw(whole, layout=layout, dtype=kind[0])
    last = layout == "channels_last"
    problem = case.problem(kind)._replace(
        channels_last=last, packed=True, pixel_stride=64 if last else 0
    )
    plan = support.make_conv_plan(problem, GATHERED)
    arenas = session.Arena(), session.Arena()
    packed, _ = arenas[0].scratch(plan.packed_bytes)
    binding.pack_conv_weight(plan, weight.data_ptr(), weight.stride(), packed, 0)
    size = plan.workspace_bytes
    assert (size == 0) == (last and kind[0] is not torch.float32)
    workspace = arenas[1].scratch(size)[0] if size else 0
    value = case.theirs(*wide((x, weight)))
    result = laid_out(torch.full_like(value, float("nan")), layout).to(kind[0])
    tensors = (x.data_ptr(), x.stride(), weight.data_ptr(), weight.stride(), packed)
    given = (None, 0.0, 0.0, workspace, 1.0, 0)
    binding.run_conv(plan, *tensors, (), (), result.data_ptr(), *given)
    assert torch.equal(result, value.to(kind[0]))
    for arena in arenas:
        arena.check()


@every_kind
def test_pixels_as_they_lie(kind: Kind) -> None:
    case = ConvCase(64, 40, (1, 1), (9, 8), 2)
    tensors = case.draw(whole, layout="channels_last", dtype=kind[0])
    with forced_conv_policy(PIXELS), exact_promotion():
        result = case.ours(*tensors, epilogue=(pcf.mul(2.0),), precision=kind[1])
    assert torch.equal(result, (2 * case.theirs(*wide(tensors))).to(kind[0]))
