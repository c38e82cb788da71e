"""Sums of whole numbers small enough to be exact are exact, under every compiled policy."""

import pytest
import torch

import pycutfuse as pcf
from pycutfuse._loader import native
from pycutfuse.testing import exact_promotion, forced_policy, guarded, integers

from ..cases.sizes import KERNEL, SizeCase

pytestmark = pytest.mark.cuda


def policies() -> list[object]:
    binding = native().binding
    return [] if binding is None else list(binding.compiled_policies())


# None: what select_policy chooses.
POLICIES = [None, *policies()]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("size", KERNEL, ids=str)
def test_linear(policy, size: SizeCase, cuda: torch.device, fused: None) -> None:
    x = integers((size.m, size.k), seed=1, device=cuda)
    weight = integers((size.n, size.k), seed=2, device=cuda)
    bias = integers((size.n,), seed=3, device=cuda)
    full = integers((size.m, size.n), seed=4, device=cuda)
    with forced_policy(policy), exact_promotion(), guarded():
        result = pcf.ops.linear(x, weight, bias, epilogue=(pcf.add(full), pcf.relu()))
    exact = (x.double() @ weight.double().T + bias.double() + full.double()).relu()
    assert torch.equal(result.double(), exact)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_batch_norm_in_evaluation(policy, cuda: torch.device, fused: None) -> None:
    x, weight = integers((333, 129), seed=1, device=cuda), integers((260, 129), seed=2, device=cuda)
    mean = integers((260,), seed=3, device=cuda)
    var = torch.full((260,), 0.25, device=cuda)
    with forced_policy(policy), exact_promotion(), guarded():
        result = pcf.ops.linear_batch_norm(x, weight, running_mean=mean, running_var=var, eps=0.0)
    exact = (x.double() @ weight.double().T - mean.double()) * 2
    assert torch.equal(result.double(), exact)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_batch_norm_in_training(policy, cuda: torch.device, fused: None) -> None:
    x, weight = integers((333, 129), seed=1, device=cuda), integers((260, 129), seed=2, device=cuda)
    with forced_policy(policy), guarded():
        result = pcf.ops.linear_batch_norm(x, weight, training=True)
    z = x.double() @ weight.double().T
    exact = torch.nn.functional.batch_norm(z, None, None, training=True)
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_runs_are_bitwise_repeatable(policy, cuda: torch.device, fused: None) -> None:
    layer = pcf.nn.LinearScaleBatchNorm1d(1000, 500, (500,), device=cuda)
    x = torch.rand(700, 1000, device=cuda)
    with forced_policy(policy), torch.no_grad():
        first = layer(x)
        assert all(torch.equal(layer(x), first) for _ in range(5))


def test_ones_count_to_k(cuda: torch.device, fused: None) -> None:
    for k in (64, 65, 71, 72, 127, 128, 8191, 8192, 8193):
        x, weight = torch.ones(3, k, device=cuda), torch.ones(130, k, device=cuda)
        with exact_promotion():
            assert bool((pcf.ops.linear(x, weight) == k).all())
