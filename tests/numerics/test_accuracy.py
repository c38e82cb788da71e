"""Against float64 the error is at most the larger of PyTorch's and the tier's rounding."""

import pytest
import torch
import torch.nn.functional as F

import pycutfuse as pcf
from pycutfuse.testing import DISTRIBUTIONS, generate, no_worse

from ..cases.programs import CHAINS, ProgramCase
from ..cases.sizes import KERNEL, SizeCase
from .common import compare, exact_linear, torch_linear

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("k", [64, 512, 4096, 8192, 16384, 20000])
def test_linear_over_the_reduced_size(
    distribution: str, k: int, cuda: torch.device, fused: None
) -> None:
    x = generate(distribution, (512, k), seed=1, device=cuda)
    weight = generate(distribution, (512, k), seed=2, device=cuda)
    result = pcf.ops.linear(x, weight)
    pair = compare(result, torch_linear(x, weight), *exact_linear(x, weight))
    assert no_worse(*pair) is None, no_worse(*pair)


@pytest.mark.parametrize("size", KERNEL, ids=str)
def test_linear_of_every_size(size: SizeCase, cuda: torch.device, fused: None) -> None:
    x = generate("rand", (size.m, size.k), seed=1, device=cuda)
    weight = generate("randn", (size.n, size.k), seed=2, device=cuda)
    result = pcf.ops.linear(x.view(*size.leading, size.k), weight).view(size.m, size.n)
    pair = compare(result, torch_linear(x, weight), *exact_linear(x, weight))
    assert no_worse(*pair) is None, no_worse(*pair)


@pytest.mark.parametrize("program", CHAINS, ids=str)
def test_programs(program: ProgramCase, cuda: torch.device, fused: None) -> None:
    x = generate("randn", (300, 512), seed=1, device=cuda)
    weight = generate("randn", (256, 512), seed=2, device=cuda) / 16
    operands = program.operands(300, 256, device="cuda")
    result = pcf.ops.linear(x, weight, epilogue=program.build(operands))
    theirs = program.plain(torch_linear(x, weight), operands)
    exact = program.plain(x.double() @ weight.double().T, [o.double() for o in operands])
    pair = compare(result, theirs, exact)
    assert no_worse(*pair) is None, no_worse(*pair)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [(1000, 1024, 512), (4096, 300, 257)], ids=str)
def test_linear_scale_batch_norm(
    distribution: str, training: bool, size, cuda: torch.device, fused: None
) -> None:
    m, k, n = size
    torch.manual_seed(3)
    layer = pcf.nn.LinearScaleBatchNorm1d(k, n, (n,), device=cuda).train(training)
    x = generate(distribution, (m, k), seed=1, device=cuda)
    wide = layer.to_torch()
    with torch.no_grad():
        layer.bn.running_mean.copy_(generate("randn", (n,), seed=5))
        layer.bn.running_var.copy_(generate("rand", (n,), seed=6) + 0.5)
        z64 = F.linear(x.double(), layer.gemm.weight.double(), layer.gemm.bias.double())
        z64 = z64 * layer.scale.double()
        stats = [layer.bn.running_mean.double(), layer.bn.running_var.double()]
        exact = F.batch_norm(z64, *stats, training=training)
        saved = [layer.bn.running_mean.clone(), layer.bn.running_var.clone()]
        z = F.linear(x, wide.gemm.weight, wide.gemm.bias) * wide.scale
        theirs = F.batch_norm(z, *saved, training=training)
        pair = compare(layer(x), theirs, exact)
    assert no_worse(*pair) is None, no_worse(*pair)
    if training:
        means = compare(layer.bn.running_mean, saved[0], stats[0])
        variances = compare(layer.bn.running_var, saved[1], stats[1])
        assert no_worse(*means) is None, no_worse(*means)
        assert no_worse(*variances) is None, no_worse(*variances)


@pytest.mark.parametrize("mean", [0.0, 100.0, 1e4])
def test_variance_of_data_far_from_zero(mean: float, cuda: torch.device, fused: None) -> None:
    """E[x^2] - E[x]^2 would lose everything here."""
    x = torch.ones(4096, 64, device=cuda)
    x[:, 1] = generate("randn", (4096,), seed=1, device=cuda)
    weight = torch.zeros(64, 64, device=cuda)
    weight[:, 0], weight[:, 1] = mean, 1.0
    result = pcf.ops.linear_batch_norm(x, weight, training=True)
    theirs = F.batch_norm(F.linear(x, weight), None, None, training=True)
    exact = F.batch_norm(x.double() @ weight.double().T, None, None, training=True)
    # Both are bound by fp32's rounding of the 64 columns' values near `mean`, so they tie.
    ours, torchs = compare(result, theirs, exact)
    assert ours.frobenius <= 1.1 * max(torchs.frobenius, 2**-22)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_gradients(distribution: str, cuda: torch.device, fused: None) -> None:
    x = generate(distribution, (700, 512), seed=1, device=cuda).requires_grad_()
    weight = generate("randn", (300, 512), seed=2, device=cuda).requires_grad_()
    grad = generate("randn", (700, 300), seed=3, device=cuda)
    ours = torch.autograd.grad(pcf.ops.linear(x, weight), (x, weight), grad)
    theirs = torch.autograd.grad(torch_linear(x, weight), (x, weight), grad)
    wide = grad.double()
    exact = (wide @ weight.double(), wide.T @ x.double())
    for one, other, value in zip(ours, theirs, exact, strict=True):
        pair = compare(one, other, value)
        assert no_worse(*pair) is None, no_worse(*pair)
