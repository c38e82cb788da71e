"""Batch norm within the contraction: blocks that wait for each other's moments."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import pycutfuse as pcf
from pycutfuse.program import encode
from pycutfuse.reference import apply_program
from pycutfuse.testing import forced_policy, generate, guarded, kinds, kinds_of, turned_policy

from ..cases import moments
from .test_integers import RUNS, TOLERANCES, draw, policies

pytestmark = pytest.mark.cuda

INF = float("inf")

NARROW = [torch.float16, torch.bfloat16]
TURNED = [(turned_policy(), torch.float32, "tf32")] if policies() else []
NARROW_TURNED = [(turned_policy(dtype=d), d, "ieee") for d in NARROW] if policies() else []

# One row of tiles, a padded cluster, several waves, most rows of tiles, and more than those.
SIZES = [(2, 130, 70), (300, 700, 129), (1000, 3001, 65), (2048, 2500, 72), (2049, 300, 64)]


class Norm:
    """Batch norm's tensors, and what torch makes of them in float64."""

    def __init__(self, n: int) -> None:
        self.mean = generate("randn", (n,), seed=5, device="cuda")
        self.var = generate("rand", (n,), seed=6, device="cuda") + 0.5
        self.weight = generate("randn", (n,), seed=7, device="cuda")
        self.bias = generate("randn", (n,), seed=8, device="cuda")
        self.count = torch.tensor(3, device="cuda")

    def fused(self, x: Tensor, weight: Tensor, tier: str = "ieee", **options) -> Tensor:
        return pcf.ops.linear_batch_norm(
            x,
            weight,
            running_mean=self.mean,
            running_var=self.var,
            num_batches_tracked=self.count,
            bn_weight=self.weight,
            bn_bias=self.bias,
            training=True,
            precision=tier,
            **options,
        )

    def exact(self, z: Tensor, momentum: float = 0.1) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = self.mean.double(), self.var.double()
        terms = self.weight.double(), self.bias.double()
        return F.batch_norm(z, mean, var, *terms, True, momentum), mean, var


@pytest.mark.parametrize(("policy", "dtype", "tier"), [*RUNS, *TURNED, *NARROW_TURNED], ids=repr)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_results_and_statistics(policy, dtype, tier: str, size, fused: None) -> None:
    m, n, k = size
    if (policy, dtype, tier) in NARROW_TURNED:
        n += -n % 8
    x, weight = draw(m, k, seed=1, dtype=dtype), draw(n, k, seed=2, dtype=dtype)
    norm = Norm(n)
    exact, mean, var = norm.exact(x.double() @ weight.double().T, momentum=0.25)
    with forced_policy(policy), guarded():
        result = norm.fused(x, weight, tier, momentum=0.25, after=(pcf.relu(),))
    close = {"rtol": TOLERANCES[dtype], "atol": 4 * TOLERANCES[dtype]}
    torch.testing.assert_close(result.double(), exact.relu(), **close)
    torch.testing.assert_close(norm.mean.double(), mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(norm.var.double(), var, rtol=1e-5, atol=1e-6)
    assert int(norm.count) == 4


@pytest.mark.parametrize(
    "after", [(), (pcf.clamp(-0.5, 0.25),), (pcf.minimum(0.1),), (pcf.sigmoid(), pcf.mul(2.0))]
)
@pytest.mark.parametrize("momentum", [0.0, 1.0, None])
def test_programs_after_and_momenta(after, momentum, cuda: torch.device, fused: None) -> None:
    x = generate("randn", (700, 96), seed=1, device=cuda)
    weight = generate("randn", (260, 96), seed=2, device=cuda)
    norm = Norm(260)
    exact, mean, var = norm.exact(
        x.double() @ weight.double().T, momentum or (momentum is None) / 4
    )
    result = norm.fused(x, weight, momentum=momentum, after=after)
    program = encode(after)
    exact = apply_program(exact, program.codes, program.constants, ())
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.mean.double(), mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(norm.var.double(), var, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tier"), kinds_of(None), ids=repr)
def test_columns_far_from_zero_keep_their_variance(dtype, tier, cuda, fused: None) -> None:
    """Partial means may be large and far apart: one block of 64 rows lies far from the others."""
    x, weight = draw(1024, 64, seed=1, dtype=dtype), draw(256, 64, seed=2, dtype=dtype)
    x[:64] += 64
    z = x.double() @ weight.double().T
    result = pcf.ops.linear_batch_norm(x, weight, training=True, precision=tier)
    close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    torch.testing.assert_close(result.double(), F.batch_norm(z, None, None, training=True), **close)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("offset", moments.OFFSETS)
@pytest.mark.parametrize("n", [330, 328])  # the tensor cores take moments of whole vectors
@pytest.mark.parametrize("m", [300, 1000, 5003])  # more than exchange their moments
def test_columns_that_are_rounded(m: int, n: int, offset: float, dtype, fused: None) -> None:
    moments.check_statistics(m, n, offset, dtype, "cuda")


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("m", [300, 5003])
def test_columns_of_extremes(m: int, dtype: torch.dtype, fused: None) -> None:
    moments.check_extremes(m, dtype, "cuda")


def test_a_constant_column_is_its_bias(cuda: torch.device, fused: None) -> None:
    x, weight = torch.ones(1024, 64, device=cuda), torch.ones(256, 64, device=cuda)
    bias = generate("randn", (256,), seed=1, device=cuda)
    result = pcf.ops.linear_batch_norm(x, weight, bn_bias=bias, training=True)
    assert torch.equal(result, bias.expand(1024, 256))


def test_columns_that_are_not_finite(cuda: torch.device, fused: None) -> None:
    x = generate("randn", (1000, 96), seed=1, device=cuda)
    weight = generate("randn", (700, 96), seed=2, device=cuda)
    weight[5, 7], weight[300, 0], weight[699, 95] = INF, -INF, float("nan")
    norm = Norm(700)
    mean, var = norm.mean.clone(), norm.var.clone()
    theirs = F.batch_norm(F.linear(x, weight), mean, var, norm.weight, norm.bias, True).relu()
    ours = norm.fused(x, weight, after=(pcf.relu(),))
    assert torch.equal(kinds(ours), kinds(theirs))
    assert torch.equal(norm.mean.isfinite(), mean.isfinite())
    assert torch.equal(norm.var.isnan(), var.isnan())


@pytest.mark.parametrize(("dtype", "tier"), kinds_of(None), ids=repr)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_no_pass_follows(momentum, dtype, tier: str, cuda: torch.device, fused: None) -> None:
    """Unless every block would read the count of batches that one of them raises."""
    x, weight = draw(1024, 96, seed=1, dtype=dtype), draw(8192, 96, seed=2, dtype=dtype)
    norm = Norm(8192)
    norm.fused(x, weight, tier, momentum=momentum)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        norm.fused(x, weight, tier, momentum=momentum)
        torch.cuda.synchronize()
    kernels = [event.key for event in profiled.key_averages()]
    assert any("cutlass::device_kernel" in name for name in kernels)
    follows = any("::normalise_" in name for name in kernels)
    # A smaller GPU may not hold all blocks at once, and then a pass is right.
    small = torch.cuda.get_device_properties(cuda).multi_processor_count < 132
    assert follows == (momentum is None) or (follows and small)


@pytest.mark.parametrize(("dtype", "tier"), kinds_of(None), ids=repr)
def test_replays_clear_what_they_count(dtype, tier: str, cuda, fused: None) -> None:
    x, weight = draw(1024, 96, seed=1, dtype=dtype), draw(4096, 96, seed=2, dtype=dtype)
    norm = Norm(4096)
    norm.fused(x, weight, tier)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = norm.fused(x, weight, tier)
    for seed in range(3):
        x.copy_(draw(1024, 96, seed=10 + seed, dtype=dtype))
        count = int(norm.count)
        graph.replay()
        assert int(norm.count) == count + 1
        exact, _, _ = norm.exact(x.double() @ weight.double().T)
        close = {"rtol": TOLERANCES[dtype], "atol": 4 * TOLERANCES[dtype]}
        torch.testing.assert_close(result.double(), exact, **close)
