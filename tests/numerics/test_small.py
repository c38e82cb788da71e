"""Products without tensor cores, by each policy that runs them."""

import pytest
import torch

import pycutfuse as pcf
from pycutfuse._loader import native
from pycutfuse.testing import (
    DISTRIBUTIONS,
    LAYOUTS,
    floor_of,
    forced_policy,
    generate,
    kinds_of,
    no_worse,
    small_policies,
)
from pycutfuse.testing.forcing import Kind

from ..cases import small
from .common import compare, exact_linear, torch_linear

pytestmark = pytest.mark.cuda

POLICIES = [] if native().binding is None else small_policies()
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=repr)
KINDS = pytest.mark.parametrize("kind", kinds_of(None), ids=str)


@each_policy
@KINDS
@pytest.mark.parametrize("size", [*small.SIZES, *small.DEEP], ids=str)
def test_whole_numbers(policy: object, kind: Kind, size: tuple[int, int, int], fused: None) -> None:
    if small.reaches(policy, size[2]):
        small.check_whole_numbers(policy, kind, size, "cuda")


@each_policy
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(130, 70, 33), (33, 65, 124)], ids=str)
@KINDS
def test_layouts(
    policy: object, layout: str, size: tuple[int, int, int], kind: Kind, fused: None
) -> None:
    small.check_whole_numbers(policy, kind, size, "cuda", layout)


@each_policy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_alignments(policy: object, dtype: torch.dtype, fused: None) -> None:
    small.check_alignments(policy, "cuda", dtype)


@pytest.mark.parametrize("size", [(65, 1854, 115), (60, 19, 1249)], ids=str)
def test_16_bits_are_read_as_they_lie(size: tuple[int, int, int], fused: None) -> None:
    m, n, k = size
    layer = pcf.nn.Linear(k, n, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(m, k + 1, device="cuda", dtype=torch.bfloat16)[:, 1:]
    found = pcf.explain(layer, x)
    assert any("without tensor cores" in stage for stage in found.stages)
    assert not any("copied" in note for note in found.notes)
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    assert (layer(x).double() - exact).norm() <= 2.0**-8 * exact.norm()


@each_policy
def test_not_finite(policy: object, fused: None) -> None:
    small.check_not_finite(policy, "cuda")


@each_policy
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("k", [1, 3, 16, 21, 40, 59, 128, 512, 2000, 4096, 12288, 24576])
def test_errors_are_no_worse_than_pytorchs(
    policy: object, distribution: str, k: int, fused: None
) -> None:
    if not small.reaches(policy, k):
        return
    x = generate(distribution, (300, k), seed=1, device="cuda")
    weight = generate(distribution, (200, k), seed=2, device="cuda") / 64
    with forced_policy(policy):  # type: ignore[arg-type]
        ours = pcf.ops.linear(x, weight, precision="ieee")
    pair = compare(ours, torch_linear(x, weight), *exact_linear(x, weight))
    assert no_worse(*pair, floor=floor_of(torch.float32, "ieee")) is None


@pytest.mark.parametrize("k", [1, 7, 40, 63])
@pytest.mark.parametrize("tier", ["ieee", "tf32"])
def test_sums_of_few_products_run_and_train(k: int, tier: str, fused: None) -> None:
    layer = pcf.nn.Linear(k, 300, epilogue=(pcf.gelu(),), device="cuda", precision=tier)
    x = torch.randn(500, k, device="cuda", requires_grad=True)
    assert any("without tensor cores" in stage for stage in pcf.explain(layer, x).stages)
    result = layer(x)
    grad = torch.randn_like(result)
    found = torch.autograd.grad(result, (x, layer.weight, layer.bias), grad)
    ours = [one.detach().double().requires_grad_() for one in (x, layer.weight, layer.bias)]
    exact = torch.nn.functional.gelu(torch.nn.functional.linear(*ours))
    wanted = torch.autograd.grad(exact, ours, grad.double())
    floor = 2.0**-20 if tier == "ieee" else 2.0**-9
    for one, other in zip((result, *found), (exact, *wanted), strict=True):
        assert (one.double() - other).norm() <= floor * other.norm()
