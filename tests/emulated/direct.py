"""Direct kernels on the host; test_kernels.py runs this file with plugin.py."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse.testing import forced_conv_policy, generate, guarded, integers, kinds
from pycutfuse.testing.forcing import Kind

from ..cases.conv import KINDS, ConvCase, laid_out
from ..cases.direct import DIRECT, OTHERS, WINDOWS
from ..numerics.conv_common import bound_of, check, torch_conv, wide
from . import session
from .plugin import binding

SELECTED, ANY = 1, 2

# Each by what is selected for it, and some that have a kernel of their own by the one for any.
every_case = pytest.mark.parametrize(
    ("direct", "case"),
    [(SELECTED, case) for case in DIRECT] + [(ANY, case) for case in (*WINDOWS[:6], WINDOWS[18])],
    ids=str,
)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
few_kinds = pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids=str)
every_layout = pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gapped"])
both_layouts = pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
either_kernel = pytest.mark.parametrize("direct", [SELECTED, ANY])
TAIL = {"eps": 1e-30, "training": False}


def forced(direct: int) -> object:
    return forced_conv_policy(binding.ConvPolicy(0, direct=direct))


@pytest.fixture(autouse=True)
def direct_kernels(fused: None) -> Iterator[None]:
    with forced(SELECTED):
        yield


def whole(shape: tuple[int, ...], seed: int) -> Tensor:
    return integers(shape, seed=seed)


def randn(shape: tuple[int, ...], seed: int) -> Tensor:
    return generate("randn", shape, seed=seed)


@every_kind
@every_layout
@every_case
def test_whole_numbers_are_exact(direct: int, kind: Kind, layout: str, case: ConvCase) -> None:
    tensors = case.draw(whole, layout=layout, dtype=kind[0])
    value = case.theirs(*wide(tensors))
    full = whole(value.shape, 4).to(kind[0])
    with forced(direct), guarded():
        bare = case.ours(*tensors, precision=kind[1])
        steps = (pcf.add(full), pcf.relu())
        result = case.ours(*tensors, epilogue=steps, precision=kind[1])
    assert torch.equal(bare, value.to(kind[0]))
    assert torch.equal(result, (value + full.double()).relu().to(kind[0]))
    if layout in ("contiguous", "channels_last"):
        assert result.stride() == case.theirs(*tensors).stride()


@pytest.mark.parametrize(
    "policy", [p for p in binding.compiled_conv_policies() if p.direct], ids=repr
)
@every_kind
def test_each_policy(policy: object, kind: Kind) -> None:
    taken = 0
    for case in DIRECT:
        tensors = case.draw(whole, dtype=kind[0])
        with forced_conv_policy(policy):
            try:
                result = case.ours(*tensors, precision=kind[1])
            except NotImplementedError:
                continue
        assert torch.equal(result, case.theirs(*wide(tensors)).to(kind[0]))
        taken += 1
    assert taken > 0


@either_kernel
@every_kind
@both_layouts
@pytest.mark.parametrize("case", [WINDOWS[0], WINDOWS[2], WINDOWS[11]], ids=str)
def test_operands_of_whatever_broadcasts(direct, kind: Kind, layout: str, case: ConvCase) -> None:
    tensors = case.draw(whole, layout=layout, dtype=kind[0])
    expected = case.theirs(*wide(tensors))
    n, k, h, w = expected.shape
    shapes = [(k, 1, 1), (1,), (n, 1, 1, 1), (h, w), (w,), (k, h, 1), (n, k, 1, 1), (n, k, h, w)]
    steps = [] if case.bias else [pcf.mul(1.0)]
    for seed, shape in enumerate(shapes):
        other = "contiguous" if layout == "channels_last" else "channels_last"
        operand = whole(shape, seed).to(kind[0])
        operand = laid_out(operand, other) if len(shape) == 4 else operand
        steps += [pcf.add(operand)] + [pcf.maximum(-200.0)] * (seed > 0)
        expected = (expected + operand.double()).clamp(min=-200.0)
    assert len(steps) + case.bias == 16
    with forced(direct), guarded():
        result = case.ours(*tensors, epilogue=tuple(steps), precision=kind[1])
    assert torch.equal(result, expected.to(kind[0]))


@either_kernel
@every_kind
@both_layouts
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("case", [WINDOWS[1], WINDOWS[5], OTHERS[2]], ids=str)
def test_batch_norm_in_eval(
    direct: int, kind: Kind, layout: str, affine: bool, case: ConvCase
) -> None:
    tensors = case.draw(whole, layout=layout, dtype=kind[0])
    k = (case.out_channels,)
    mean, var = whole(k, 5), torch.full(k, 0.25)
    own = {"bn_weight": whole(k, 6), "bn_bias": whole(k, 7)} if affine else {}
    with forced(direct), guarded():
        result = pcf.ops.conv2d_batch_norm(
            *tensors,
            **case.options,
            **own,
            **TAIL,
            running_mean=mean,
            running_var=var,
            epilogue=(pcf.relu(),),
            after=(pcf.mul(2.0),),
            precision=kind[1],
        )
    z = case.theirs(*wide(tensors)).relu()
    statistics = [one.double() for one in (mean, var, *own.values())]
    expected = 2 * F.batch_norm(z, *statistics, eps=1e-30)
    assert torch.equal(result, expected.to(kind[0]))


@either_kernel
@every_kind
@pytest.mark.parametrize("draw", ["randn", "rand", "lognormal"])
@pytest.mark.parametrize("case", [WINDOWS[0], WINDOWS[8], WINDOWS[18], OTHERS[3]], ids=str)
def test_accuracy(direct: int, kind: Kind, draw: str, case: ConvCase) -> None:
    made = case.draw(lambda shape, seed: generate(draw, shape, seed=seed), dtype=kind[0])
    exact, bound = case.theirs(*wide(made)), bound_of(case, *made)
    with forced(direct):
        result = case.ours(*made, precision=kind[1])
    check(result, torch_conv(case, *made, tier=kind[1]), exact, kind, bound)


@few_kinds
@both_layouts
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@every_case
def test_non_finite_values_stay_where_they_are_met(
    direct: int, kind: Kind, layout: str, bad: float, case: ConvCase
) -> None:
    x, weight, bias = case.draw(randn, layout=layout, dtype=kind[0])
    with forced(direct):
        for at in (0, -1):
            spoilt = x.clone()
            spoilt[(at,) * x.dim()] = bad
            ours = case.ours(spoilt, weight, bias, precision=kind[1])
            assert torch.equal(kinds(ours), kinds(case.theirs(*wide((spoilt, weight, bias)))))


@few_kinds
@both_layouts
@every_case
def test_padding_is_no_factor(direct: int, kind: Kind, layout: str, case: ConvCase) -> None:
    bad = float("inf")
    x, weight, bias = case.draw(randn, layout=layout, dtype=kind[0])
    for at in (0, -1):
        spoilt, tap = weight.clone(), torch.zeros_like(weight)
        spoilt[(at,) * 4], tap[(at,) * 4] = bad, 1.0
        with forced(direct):
            ours = case.ours(x, spoilt, bias, precision=kind[1])
        zeroed = torch.where(tap > 0, 0.0, spoilt)
        finite = case.theirs(*wide((x, zeroed, bias)))
        met = case.theirs(*wide((x, tap, None)))
        inside = case.theirs(*wide((torch.ones_like(x), tap, None))) > 0
        expected = torch.where(inside, finite + met * bad, finite)
        assert torch.equal(kinds(ours), kinds(expected))
        same = ~inside
        torch.testing.assert_close(
            ours.double()[same], finite[same], rtol=2e-2, atol=2e-2, check_dtype=False
        )


@both_layouts
@pytest.mark.parametrize("direct", [SELECTED, ANY])
def test_an_infinity_outweighs_products_that_overflow(direct: int, layout: str) -> None:
    """As one product follows the other, in whichever row or channel of the filter they are."""
    case = ConvCase(4, 4, (3, 3), (6, 7), 2, groups=2, padding=1, bias=False)
    for h in range(6):
        x, weight, _ = case.draw(lambda shape, seed: torch.ones(shape), layout=layout)
        x[:, 0, h, 3] = -float("inf")
        x[:, :, h + 1 :] = 2.0**100
        with forced(direct):
            result = case.ours(x, weight * 2.0**100, None)
        # Of fp64, whose products do not overflow: some hosts' torch has NaN there.
        expected = case.theirs(x.double(), weight.double() * 2.0**100, None).float()
        assert torch.equal(kinds(result), kinds(expected))


@either_kernel
@every_kind
@both_layouts
@pytest.mark.parametrize("shift", [1, 2, 4])
def test_images_at_any_address(direct: int, kind: Kind, layout: str, shift: int) -> None:
    case = WINDOWS[2]
    x, weight, bias = case.draw(whole, layout=layout, dtype=kind[0])
    memory = x.new_full((x.numel() + shift,), float("nan"))
    moved = torch.as_strided(memory, x.shape, x.stride(), shift).copy_(x)
    with forced(direct), guarded():
        result = case.ours(moved, weight, bias, precision=kind[1])
        expanded = case.ours(x[:1].expand(3, -1, -1, -1), weight, bias, precision=kind[1])
    value = case.theirs(*wide((x, weight, bias)))
    assert torch.equal(result, value.to(kind[0]))
    assert torch.equal(expanded, value[:1].expand(3, -1, -1, -1).to(kind[0]))


@every_kind
@both_layouts
def test_results_at_any_address(kind: Kind, layout: str) -> None:
    """Fours of a row of results that cannot be stored at once."""
    case, arena = WINDOWS[2], session.Arena()
    x, weight, _ = case.draw(whole, layout=layout, dtype=kind[0])
    problem = case.problem(kind)._replace(channels_last=layout == "channels_last")
    plan = session.support.make_conv_plan(problem, binding.ConvPolicy(0, direct=SELECTED))
    value = case.theirs(*wide((x, weight)))
    like = laid_out(value, layout)
    at, owner = arena.scratch((value.numel() + 1) * x.itemsize)
    out = at + x.itemsize
    given = (None, 0.0, 0.0, 0, 1.0, 0)
    tensors = (x.data_ptr(), x.stride(), weight.data_ptr(), weight.stride(), 0)
    binding.run_conv(plan, *tensors, (), (), out, *given)
    first = out - owner.data_ptr()
    flat = owner[first : first + value.numel() * x.itemsize].clone().view(x.dtype)
    assert torch.equal(flat.as_strided(value.shape, like.stride()), value.to(x.dtype))
    arena.check()


def test_a_part_of_x_that_spans_too_much_is_refused() -> None:
    case = WINDOWS[2]
    x, weight, _ = case.draw(whole)
    plan = session.support.make_conv_plan(case.problem(KINDS[0]), binding.ConvPolicy(0, direct=1))
    rest = (weight.data_ptr(), weight.stride(), 0, (), (), 256, None, 0.0, 0.0, 0, 1.0, 0)
    with pytest.raises(NotImplementedError, match=r"spans \d+ elements; make x contiguous"):
        binding.run_conv(plan, x.data_ptr(), (0, 0, 2**29, 1), *rest)


def test_it_is_the_kernels_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, run = [], binding.run_conv
    monkeypatch.setattr(binding, "run_conv", lambda *given: launched.append(run(*given)))
    for case in DIRECT:
        case.ours(*case.draw(whole))
    assert len(launched) == len(DIRECT)
