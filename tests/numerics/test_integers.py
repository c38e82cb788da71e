"""Sums of whole numbers small enough to be exact are exact, under every compiled policy."""

import pytest
import torch
from torch import Tensor

import pycutfuse as pcf
from pycutfuse._loader import native
from pycutfuse.testing import exact_promotion, forced_policy, guarded, integers, kinds_of

from ..cases.sizes import KERNEL, SizeCase

pytestmark = pytest.mark.cuda


def policies() -> list[object]:
    binding = native().binding
    return [] if binding is None else list(binding.compiled_policies())


# None: what select_policy chooses. Each with every dtype and tier that it multiplies.
RUNS = [(policy, *kind) for policy in (None, *policies()) for kind in kinds_of(policy)]
every_policy = pytest.mark.parametrize(("policy", "dtype", "tier"), RUNS, ids=repr)
# Of a batch norm's result, whose 16-bit values were rounded before, at up to 150.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return integers(shape, seed=seed, device="cuda").to(dtype)


@every_policy
@pytest.mark.parametrize("size", KERNEL, ids=str)
def test_linear(policy, dtype, tier: str, size: SizeCase, fused: None) -> None:
    x = draw(size.m, size.k, seed=1, dtype=dtype)
    weight = draw(size.n, size.k, seed=2, dtype=dtype)
    bias = draw(size.n, seed=3, dtype=dtype)
    full = draw(size.m, size.n, seed=4, dtype=dtype)
    steps = (pcf.add(full), pcf.relu())
    with forced_policy(policy), exact_promotion(), guarded():
        result = pcf.ops.linear(x, weight, bias, epilogue=steps, precision=tier)
    exact = (x.double() @ weight.double().T + bias.double() + full.double()).relu()
    assert torch.equal(result, exact.to(dtype))  # rounded once


@every_policy
@pytest.mark.parametrize("large", [False, True])
def test_many_tiles_of_a_block(policy, dtype, tier: str, large: bool, fused: None) -> None:
    m, n, k = 2500, 2700, 65
    x, weight = draw(m, k, seed=1, dtype=dtype), draw(n, k, seed=2, dtype=dtype)
    bias, vector = draw(n, seed=3, dtype=dtype), draw(n, seed=4, dtype=dtype)
    # Factors of 2^42 in one column are not folded, and bring the steps' operands to its tiles.
    factor = torch.ones(n, device="cuda", dtype=dtype)
    factor[300] = 2.0**14 if large else 0.5
    up, down = 3 * (pcf.mul(factor),), 3 * (pcf.mul(1 / factor),)
    steps = (*up, pcf.relu(), *down, pcf.add(vector))
    with forced_policy(policy), exact_promotion():
        result = pcf.ops.linear(x, weight, bias, epilogue=steps, precision=tier)
        again = pcf.ops.linear(x, weight, bias, epilogue=steps, precision=tier)
    exact = (x.double() @ weight.double().T + bias.double()).relu() + vector.double()
    assert torch.equal(result, exact.to(dtype))
    assert torch.equal(result, again)


@every_policy
def test_rows_that_are_not_finite_among_many_tiles(policy, dtype, tier: str, fused: None) -> None:
    m, n, k = 2500, 2700, 65
    x, weight = draw(m, k, seed=1, dtype=dtype), draw(n, k, seed=2, dtype=dtype)
    bias = draw(n, seed=3, dtype=dtype)
    x[::500, 7] = torch.nan  # beside rows that are finite, in tiles whose steps were folded
    with forced_policy(policy), exact_promotion():
        result = pcf.ops.linear(x, weight, bias, precision=tier)
    exact = (x.double() @ weight.double().T + bias.double()).to(dtype)
    torch.testing.assert_close(result, exact, rtol=0.0, atol=0.0, equal_nan=True)


@every_policy
def test_batch_norm_in_evaluation(policy, dtype, tier: str, fused: None) -> None:
    x, weight = draw(333, 129, seed=1, dtype=dtype), draw(260, 129, seed=2, dtype=dtype)
    mean = draw(260, seed=3, dtype=torch.float32)
    var = torch.full((260,), 0.25, device="cuda")
    stats = {"running_mean": mean, "running_var": var, "eps": 0.0}
    with forced_policy(policy), exact_promotion(), guarded():
        result = pcf.ops.linear_batch_norm(x, weight, precision=tier, **stats)
    exact = (x.double() @ weight.double().T - mean.double()) * 2
    assert torch.equal(result, exact.to(dtype))


@every_policy
def test_batch_norm_in_training(policy, dtype, tier: str, fused: None) -> None:
    x, weight = draw(333, 129, seed=1, dtype=dtype), draw(260, 129, seed=2, dtype=dtype)
    with forced_policy(policy), guarded():
        result = pcf.ops.linear_batch_norm(x, weight, training=True, precision=tier)
    z = x.double() @ weight.double().T
    exact = torch.nn.functional.batch_norm(z, None, None, training=True)
    close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    torch.testing.assert_close(result.double(), exact, **close)


@every_policy
def test_runs_are_bitwise_repeatable(policy, dtype, tier: str, fused: None) -> None:
    layer = pcf.nn.LinearScaleBatchNorm1d(
        1000, 500, (500,), device="cuda", dtype=dtype, precision=tier
    )
    x = torch.rand(700, 1000, device="cuda", dtype=dtype)
    with forced_policy(policy), torch.no_grad():
        first = layer(x)
        assert all(torch.equal(layer(x), first) for _ in range(5))


@pytest.mark.parametrize(("dtype", "tier"), kinds_of(None), ids=repr)
def test_ones_count_to_k(dtype: torch.dtype, tier: str, cuda: torch.device, fused: None) -> None:
    for k in (64, 65, 71, 72, 127, 128, 8191, 8192, 8193):
        x = torch.ones(3, k, device=cuda, dtype=dtype)
        weight = torch.ones(130, k, device=cuda, dtype=dtype)
        exact = torch.tensor(float(k)).to(dtype)
        with exact_promotion():
            assert bool((pcf.ops.linear(x, weight, precision=tier) == exact).all())


@pytest.mark.parametrize("k", [300, 1027, 2048, 2050, 4099, 8190, 16383, 16387])
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_rows_that_start_anywhere(k: int, offset: int, cuda: torch.device, fused: None) -> None:
    m = 20 if k > 2048 else 5000
    x = draw(m * k + offset, seed=1, dtype=torch.float32)[offset:].view(m, k)
    weight = draw(33 * (k + 3) + offset, seed=2, dtype=torch.float32)[offset:].view(33, k + 3)
    for tier in ("ieee", "tf32"):
        with exact_promotion(), guarded():
            result = pcf.ops.linear(x, weight[:, :k], precision=tier)
        assert torch.equal(result, (x.double() @ weight[:, :k].double().T).float())


@pytest.mark.parametrize(("dtype", "tier"), kinds_of(None)[2:], ids=repr)
def test_a_policy_of_another_kind_is_refused(dtype, tier: str, cuda: torch.device) -> None:
    x = torch.ones(64, 64, device=cuda, dtype=dtype)
    for policy in policies():
        if (dtype, tier) not in kinds_of(policy):
            with forced_policy(policy), pytest.raises(NotImplementedError):
                pcf.ops.linear(x, x, precision=tier)
