"""Few rows: sums without tensor cores, of every number of rows, alignment and layout."""

from collections.abc import Iterator

import pytest
import torch

import pycutfuse as pcf
from pycutfuse.testing import (
    LAYOUTS,
    forced_policy,
    guarded,
    integers,
    kinds_of,
    small_policies,
    strided,
)
from pycutfuse.testing.forcing import Kind

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def few_rows() -> Iterator[None]:
    """Others are faster at some of these sizes."""
    with forced_policy(small_policies()[-1]):
        yield


KINDS = pytest.mark.parametrize("kind", kinds_of(None), ids=str)
# Rows and columns: each kernel's number of rows and one more, either operand the small one.
SIZES = [(1, 33), (2, 200), (3, 31), (4, 4), (5, 1000), (8, 65), (9, 300), (12, 77), (13, 90)]
SIZES += [(16, 128), (16, 1)]
SIZES += [(n, m) for m, n in SIZES if m != n] + [(16, 17), (1, 1)]
DEPTHS = (64, 65, 127, 512, 1030, 4099)


@KINDS
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("k", DEPTHS)
def test_integers_are_exact(kind: Kind, size: tuple[int, int], k: int, fused: None) -> None:
    (m, n), (dtype, tier) = size, kind
    x = integers((m, k), seed=1, device="cuda").to(dtype)
    weight = integers((n, k), seed=2, device="cuda").to(dtype)
    bias = integers((n,), seed=3, device="cuda").to(dtype)
    with guarded():
        result = pcf.ops.linear(x, weight, bias, epilogue=(pcf.relu(),), precision=tier)
    exact = (x.double() @ weight.double().T + bias.double()).relu()
    assert torch.equal(result, exact.to(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(3, 70), (70, 11), (1, 40)], ids=str)
@pytest.mark.parametrize("offset", range(4))
def test_every_layout_and_alignment(
    layout: str, size: tuple[int, int], offset: int, fused: None
) -> None:
    (m, n), k = size, 515
    x = integers((m, k), seed=1, device="cuda")
    weight = integers((n, k + offset), seed=2, device="cuda")[:, offset:]
    one, other = strided(x, layout), strided(weight, layout) if offset == 0 else weight
    with guarded():
        result = pcf.ops.linear(one, other, precision="ieee")
    assert torch.equal(result, (x.double() @ weight.double().T).float())


@pytest.mark.parametrize("k", [515, 4096])
def test_it_is_what_runs_and_repeats(k: int, fused: None) -> None:
    layer = pcf.nn.Linear(k, 700, device="cuda", precision="ieee")
    x = torch.randn(7, k, device="cuda")
    assert any("few rows" in stage for stage in pcf.explain(layer, x).stages)
    first = layer(x)
    assert all(torch.equal(layer(x), first) for _ in range(5))
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    assert (first - exact).norm() <= 2.0**-22 * exact.norm()


def test_what_is_not_finite_stays_where_it_is(fused: None) -> None:
    x = torch.rand(5, 515, device="cuda")
    weight = torch.rand(90, 515, device="cuda")
    x[1, 7], x[3, 514] = torch.inf, torch.nan
    weight[4, 0], weight[89, 511] = -torch.inf, torch.inf
    found = pcf.ops.linear(x, weight, precision="ieee")
    wanted = x.double() @ weight.double().T
    torch.testing.assert_close(found.double(), wanted, equal_nan=True, rtol=1e-5, atol=0.0)
