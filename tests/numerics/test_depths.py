"""Several tiles a block, and any number of k-tiles: every tail, under every fp32 policy."""

import pytest
import torch

import pycutfuse as pcf
from pycutfuse.testing import exact_promotion, forced_policy, guarded

from .test_integers import draw, policies
from .test_moment_exchange import Norm

pytestmark = pytest.mark.cuda

IEEE = [None, *(policy for policy in policies() if policy.promote_k)]
every_policy = pytest.mark.parametrize("policy", IEEE, ids=repr)
# k-tiles: fewer than the pipeline holds, around a flush of blocked sums, and several flushes.
every_depth = pytest.mark.parametrize("k_tiles", [1, 2, 5, 16, 17, 33])


def depth(k_tiles: int) -> int:
    return max(64 * k_tiles - 1, 64)  # narrower ones are handed over


def operands(m: int, n: int, k_tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    k = depth(k_tiles)
    return draw(m, k, seed=1, dtype=torch.float32), draw(n, k, seed=2, dtype=torch.float32)


@every_policy
@every_depth
@pytest.mark.parametrize("n", [2700, 2701])  # by the copy engine or row by row
def test_programs(policy, k_tiles: int, n: int, fused: None) -> None:
    x, weight = operands(2500, n, k_tiles)
    x[700, 3] = torch.inf
    bias, full = (draw(*shape, seed=3, dtype=torch.float32) for shape in ((n,), (2500, n)))
    steps = (pcf.relu(), pcf.add(full), pcf.maximum(3.0), pcf.mul(0.5))
    with forced_policy(policy), exact_promotion(), guarded():
        result = pcf.ops.linear(x, weight, bias, epilogue=steps)
    exact = x.double() @ weight.double().T + bias.double()
    exact = (exact.relu() + full.double()).clamp(min=3.0) / 2
    torch.testing.assert_close(result.double(), exact, rtol=0.0, atol=0.0, equal_nan=True)


@every_policy
@every_depth
@pytest.mark.parametrize(("m", "n"), [(2500, 2700), (1000, 6001)])  # a pass after, several waves
def test_batch_norm(policy, k_tiles: int, m: int, n: int, fused: None) -> None:
    x, weight = operands(m, n, k_tiles)
    norm = Norm(n)
    exact, mean, var = norm.exact(x.double() @ weight.double().T)
    with forced_policy(policy), guarded():
        result = norm.fused(x, weight, after=(pcf.clamp(-1.5, 1.0),))
    torch.testing.assert_close(result.double(), exact.clamp(-1.5, 1.0), rtol=1e-5, atol=4e-5)
    torch.testing.assert_close(norm.mean.double(), mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(norm.var.double(), var, rtol=1e-5, atol=1e-6)
    assert int(norm.count) == 4


@every_depth
@pytest.mark.parametrize("k2_tiles", [16, 33])
def test_a_chain(k_tiles: int, k2_tiles: int, cuda: torch.device, fused: None) -> None:
    """Planes of the first contraction, rows' sums of the second; maxima rise along the columns."""
    k = depth(k_tiles)
    chain = pcf.nn.LinearSigmoidLinearLogSumExp(k, 64 * k2_tiles, 1500, device=cuda)
    with torch.no_grad():
        chain.linear2.bias.copy_(torch.arange(1500, device=cuda) / 32)
        chain.linear2.bias[700] = -torch.inf
        x = torch.rand(4000, k, device=cuda)
        result, again = chain(x), chain(x)
        hidden = torch.sigmoid(chain.double().linear1(x.double()))
        exact = torch.logsumexp(chain.linear2(hidden), 1)
    torch.testing.assert_close(result.double(), exact, rtol=2e-7, atol=2e-6)
    assert torch.equal(result, again)
