"""Patches one below the other that share a ring of rows, however the rows' magnitudes change."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import pycutfuse as pcf
from pycutfuse import support
from pycutfuse.testing import exact_promotion, forced_conv_policy, guarded, integers, kinds
from pycutfuse.testing.forcing import Kind

from ..cases.conv import ConvCase
from .conv_common import wide
from .test_conv_integers import batch_norm, policies

pytestmark = pytest.mark.cuda
# By kernels with at most 128 pixels, in strips of 32 columns, with 2 patches in the ring and 3.
TILES = sorted({(one.tile_n, one.planes) for one in policies() if 0 < one.tile_n <= 128})
every_tile = pytest.mark.parametrize(("tile_n", "planes"), TILES or [(0, 0)])
every_depth = pytest.mark.parametrize("patches", [2, 3])
CASES = [
    ConvCase(48, 24, (3, 3), (66, 70), 2, padding=1),  # two rows of results at once
    ConvCase(16, 40, (3, 3), (35, 70), 3, padding=1),  # one
    ConvCase(32, 24, (3, 3), (66, 38), 2, transposed=True),
    ConvCase(16, 40, (5, 4), (36, 40), 2, padding=2, dilation=(1, 2)),
    ConvCase(3, 40, (7, 7), (70, 80), 2, stride=2, padding=3),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def kind_of(planes: int) -> Kind:
    return torch.float32, "ieee" if planes == 2 else "tf32"


def in_strips(case: ConvCase, tile_n: int, planes: int, patches: int) -> tuple[ConvCase, object]:
    """The case with several tiles for each multiprocessor, and the policy."""
    assert tile_n > 0, "the native library has no policy of convolutions"
    case = replace(case, batch=max(2, support.device_props(0).sm_count // 12))
    policy = type(policies()[0])(tile_n, planes, strip=32, stages=patches)
    text = support.make_conv_plan(case.problem(kind_of(planes)), policy).describe()
    assert " one below the other in a ring of " in text, text
    return case, policy


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return integers(shape, seed=seed)


@every_tile
@every_depth
@every_case
def test_whole_numbers_are_exact(
    case: ConvCase, patches: int, tile_n: int, planes: int, fused: None
) -> None:
    case, policy = in_strips(case, tile_n, planes, patches)
    x, weight, _ = case.draw(draw, device="cuda")
    _, tier = kind_of(planes)
    with forced_conv_policy(policy), exact_promotion(), guarded():
        result = case.ours(x, weight, None, precision=tier)
        assert torch.equal(result, case.theirs(*wide((x, weight, None))).float())
        # Rows that leave the range of those above them: patches are converted again, with rows that
        # the patch before has. Only where they meet is anything rounded.
        rows = x.size(-2)
        x[..., rows // 3 :, :] *= 2.0**20
        x[..., rows // 2 :, :] *= 2.0**-60
        result = case.ours(x, weight, None, precision=tier)
    exact = case.theirs(*wide((x, weight, None)))
    above, below = exact.size(-2) // 5, exact.size(-2) * 3 // 4
    assert torch.equal(result[..., :above, :], exact[..., :above, :].float())
    assert torch.equal(result[..., below:, :], exact[..., below:, :].float())
    assert (result - exact).abs().max() <= 2.0**-10 * exact.abs().max()


@every_tile
@every_case
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_statistics_and_other_programs(
    layout: str, case: ConvCase, tile_n: int, planes: int, fused: None
) -> None:
    case, policy = in_strips(case, tile_n, planes, 2)
    tensors = case.draw(draw, layout=layout, device="cuda")
    exact = case.theirs(*wide(tensors))
    # A full operand beside a channels_last result is PyTorch's.
    shape = tuple(exact.shape) if layout == "contiguous" else (case.out_channels, 1, 1)
    operand = draw(shape, 4).cuda()
    with forced_conv_policy(policy), exact_promotion():
        if not case.transposed and layout == "contiguous":
            batch_norm(kind_of(planes), True, case)
        with guarded():
            steps = (pcf.add(operand), pcf.relu(), pcf.sub(operand))
            result = case.ours(*tensors, epilogue=steps, precision=kind_of(planes)[1])
    exact = (exact + operand.double()).relu() - operand.double()
    assert torch.equal(result, exact.float())


@every_tile
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_values_stay_where_they_are_met(
    bad: float, tile_n: int, planes: int, fused: None
) -> None:
    case, policy = in_strips(CASES[1], tile_n, planes, 2)
    x, weight, bias = case.draw(draw, device="cuda")
    x[1, 3, 17, 33] = bad
    with forced_conv_policy(policy):
        result = case.ours(x, weight, bias, precision=kind_of(planes)[1])
    assert torch.equal(kinds(result), kinds(case.theirs(*wide((x, weight, bias)))))
