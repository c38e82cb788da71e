"""The tf32 tier and 16-bit tensors: never less accurate than PyTorch's, against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse.testing import DISTRIBUTIONS, ErrorPair, floor_of, generate, kinds, no_worse
from pycutfuse.testing.forcing import KINDS, Kind

from ..cases.programs import CHAINS, ProgramCase
from ..cases.sizes import KERNEL, SizeCase
from .common import compare, exact_linear, torch_flag, torch_linear

pytestmark = pytest.mark.cuda

COARSE = KINDS[1:]  # float32 at ieee has files of its own
INF, NAN = float("inf"), float("nan")


def check(pair: tuple[ErrorPair, ErrorPair], kind: Kind) -> None:
    problem = no_worse(*pair, floor=floor_of(*kind))
    assert problem is None, problem


def draw(distribution: str, *shape: int, seed: int, kind: Kind) -> Tensor:
    return generate(distribution, shape, seed=seed, device="cuda").to(kind[0])


@pytest.mark.parametrize("kind", COARSE, ids=str)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("k", [64, 512, 4096, 11008, 20000])
def test_linear_over_the_reduced_size(kind: Kind, distribution: str, k: int, fused: None) -> None:
    linear_is_no_worse(kind, distribution, k)


@pytest.mark.parametrize("kind", KINDS[2:], ids=str)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("k", [1, 8, 63])
def test_16_bit_tensors_of_any_reduced_size(
    kind: Kind, distribution: str, k: int, fused: None
) -> None:
    linear_is_no_worse(kind, distribution, k)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("k", [1, 8, 63])
def test_a_small_reduced_size_is_summed_in_fp32_at_tf32(
    distribution: str, k: int, fused: None
) -> None:
    linear_is_no_worse((torch.float32, "tf32"), distribution, k)


def linear_is_no_worse(kind: Kind, distribution: str, k: int) -> None:
    x = draw(distribution, 512, k, seed=1, kind=kind)
    weight = draw(distribution, 512, k, seed=2, kind=kind) / 64
    result = pcf.ops.linear(x, weight, precision=kind[1])
    assert result.dtype is kind[0]
    check(compare(result, torch_linear(x, weight, kind[1]), *exact_linear(x, weight)), kind)


@pytest.mark.parametrize("kind", COARSE, ids=str)
@pytest.mark.parametrize("size", KERNEL, ids=str)
def test_linear_of_every_size(kind: Kind, size: SizeCase, fused: None) -> None:
    x = draw("rand", size.m, size.k, seed=1, kind=kind)
    weight = draw("randn", size.n, size.k, seed=2, kind=kind)
    result = pcf.ops.linear(x.view(*size.leading, size.k), weight, precision=kind[1])
    theirs = torch_linear(x, weight, kind[1])
    check(compare(result.view(size.m, size.n), theirs, *exact_linear(x, weight)), kind)


@pytest.mark.parametrize("kind", COARSE, ids=str)
@pytest.mark.parametrize("program", CHAINS, ids=str)
def test_programs(kind: Kind, program: ProgramCase, fused: None) -> None:
    x = draw("randn", 300, 512, seed=1, kind=kind)
    weight = draw("randn", 256, 512, seed=2, kind=kind) / 16
    operands = [o.to(kind[0]) for o in program.operands(300, 256, device="cuda")]
    result = pcf.ops.linear(x, weight, epilogue=program.build(operands), precision=kind[1])
    theirs = program.plain(torch_linear(x, weight, kind[1]), operands)
    exact = program.plain(x.double() @ weight.double().T, [o.double() for o in operands])
    check(compare(result, theirs, exact), kind)


@pytest.mark.parametrize("kind", COARSE, ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kept", [True, False], ids=["float32 norm", "norm of that dtype"])
def test_linear_scale_batch_norm(kind: Kind, training: bool, kept: bool, fused: None) -> None:
    m, k, n = 1000, 1024, 512
    torch.manual_seed(3)
    layer = pcf.nn.LinearScaleBatchNorm1d(k, n, (n,), device="cuda", precision=kind[1])
    layer.to(kind[0]).train(training)
    if kept:
        layer.bn.float()
    x = draw("randn", m, k, seed=1, kind=kind)
    with torch.no_grad():
        layer.bn.running_mean.copy_(generate("randn", (n,), seed=5))
        layer.bn.running_var.copy_(generate("rand", (n,), seed=6) + 0.5)
        wide = layer.to_torch()
        stats = [layer.bn.running_mean.clone(), layer.bn.running_var.clone()]
        stats64 = [tensor.double() for tensor in stats]
        z64 = F.linear(x.double(), layer.gemm.weight.double(), layer.gemm.bias.double())
        exact = F.batch_norm(z64 * layer.scale.double(), *stats64, training=training)
        with torch_flag(kind[1]):
            z = F.linear(x, wide.gemm.weight, wide.gemm.bias) * wide.scale
        theirs = F.batch_norm(z, *stats, wide.bn.weight, wide.bn.bias, training=training)
        result = layer(x)
    assert result.dtype is theirs.dtype is kind[0]
    check(compare(result, theirs, exact), kind)
    if training:
        for own, other, value in zip(
            (layer.bn.running_mean, layer.bn.running_var), stats, stats64, strict=True
        ):
            assert own.dtype is other.dtype
            check(compare(own, other, value), kind)


@pytest.mark.parametrize("kind", COARSE, ids=str)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_gradients(kind: Kind, distribution: str, fused: None) -> None:
    x = draw(distribution, 700, 512, seed=1, kind=kind).requires_grad_()
    weight = draw("randn", 300, 512, seed=2, kind=kind).requires_grad_()
    grad = draw("randn", 700, 300, seed=3, kind=kind)
    ours = pcf.ops.linear(x, weight, precision=kind[1])
    ours = torch.autograd.grad(ours, (x, weight), grad)
    with torch_flag(kind[1]):
        theirs = torch.autograd.grad(F.linear(x, weight), (x, weight), grad)
    wide = grad.double()
    exact = (wide @ weight.double(), wide.T @ x.double())
    for one, other, value in zip(ours, theirs, exact, strict=True):
        assert one.dtype is other.dtype
        check(compare(one, other, value), kind)


@pytest.mark.parametrize("kind", COARSE, ids=str)
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_non_finite_inputs(kind: Kind, value: float, fused: None) -> None:
    x = draw("randn", 300, 130, seed=1, kind=kind)
    weight = draw("randn", 200, 130, seed=2, kind=kind)
    x[3, 5], x[280, 129], weight[7, 5] = value, value, -value
    ours = pcf.ops.linear(x, weight, precision=kind[1])
    theirs = torch_linear(x, weight, kind[1])
    assert torch.equal(kinds(ours), kinds(theirs))
    finite = theirs.isfinite()
    torch.testing.assert_close(ours[finite], theirs[finite], rtol=0.02, atol=0.2)


@pytest.mark.parametrize("exponent", [-120, -30, 0, 60])
def test_rows_of_any_magnitude_at_tf32(exponent: int, cuda: torch.device, fused: None) -> None:
    kind = (torch.float32, "tf32")
    scales = torch.exp2(torch.linspace(-6, 6, 300, device=cuda).round())[:, None]
    x = draw("randn", 300, 130, seed=1, kind=kind) * scales * 2.0**exponent
    weight = draw("randn", 200, 130, seed=2, kind=kind)
    ours, theirs = pcf.ops.linear(x, weight, precision="tf32"), torch_linear(x, weight, "tf32")
    check(compare(ours, theirs, *exact_linear(x, weight)), kind)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_overflows_is_infinite_as_in_torch(dtype: torch.dtype, fused: None) -> None:
    largest = torch.finfo(dtype).max
    x = torch.full((64, 64), largest, device="cuda", dtype=dtype)
    weight = torch.eye(64, device="cuda", dtype=dtype)
    weight[:8] *= 2
    weight[8:16] *= -2
    ours, theirs = pcf.ops.linear(x, weight), F.linear(x, weight)
    assert torch.equal(ours, theirs)
    if dtype is torch.float16:  # steps run in float32, where torch has rounded
        assert bool(pcf.ops.linear(x, weight, epilogue=(pcf.mul(0.25),)).isfinite().all())
