"""linear and linear_batch_norm give what the plain torch chain gives."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse.testing import LAYOUTS, generate, strided

from ..cases.programs import PROGRAMS, ProgramCase
from ..cases.sizes import EMPTY, SMALL, SizeCase

CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def data(size: SizeCase, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    x = generate("randn", (*size.leading, size.k), seed=1, device=device)
    weight = generate("randn", (size.n, size.k), seed=2, device=device)
    return x, weight, generate("randn", (size.n,), seed=3, device=device)


@pytest.mark.parametrize("size", SMALL + EMPTY, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_of_every_size(size: SizeCase, with_bias: bool, device: torch.device) -> None:
    x, weight, bias = data(size, device)
    given = bias if with_bias else None
    result = pcf.ops.linear(x, weight, given, epilogue=(pcf.mul(2.0), pcf.relu()))
    expected = F.relu(F.linear(x, weight, given) * 2.0)
    assert result.shape == expected.shape
    assert result.is_contiguous()
    torch.testing.assert_close(result, expected, **CLOSE)


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_linear_with_every_program(program: ProgramCase, device: torch.device) -> None:
    x, weight, bias = data(SizeCase((6,), 8, 10), device)
    operands = program.operands(6, 10, device=str(device))
    result = pcf.ops.linear(x, weight, bias, epilogue=program.build(operands))
    expected = program.plain(F.linear(x, weight, bias), operands)
    torch.testing.assert_close(result, expected, **CLOSE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_every_layout(layout: str, device: torch.device) -> None:
    x, weight, bias = data(SizeCase((9,), 7, 5), device)
    full = generate("randn", (9, 5), seed=4, device=device)
    result = pcf.ops.linear(
        strided(x, layout),
        strided(weight, layout),
        strided(bias[None], layout)[0],
        epilogue=(pcf.add(strided(full, layout)),),
    )
    torch.testing.assert_close(result, F.linear(x, weight, bias) + full, **CLOSE)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.permute(1, 0, 2),
        lambda x: x[:, :1].expand(-1, 4, -1),
        lambda x: x[..., ::2].repeat_interleave(2, -1),
        lambda x: x.flip(0).mul(2)[1:],
    ],
    ids=["permuted", "expanded", "interleaved", "sliced"],
)
def test_views_of_three_dimensions(make, device: torch.device) -> None:
    x = make(generate("randn", (3, 4, 6), seed=1, device=device))
    weight = generate("randn", (5, 6), seed=2, device=device)
    scale = generate("rand", (x.shape[1], 1), seed=3, device=device)
    result = pcf.ops.linear(x, weight, epilogue=(pcf.mul(scale),))
    torch.testing.assert_close(result, F.linear(x, weight) * scale, **CLOSE)


def test_a_negated_view_is_read_negated(device: torch.device) -> None:
    pair = torch.randn(4, 6, dtype=torch.complex64).to(device)
    x = pair.conj().imag
    assert x.is_neg()
    weight = generate("randn", (5, 6), seed=2, device=device)
    for _ in range(2):
        torch.testing.assert_close(pcf.ops.linear(x, weight), F.linear(x, weight), **CLOSE)
    plain = x.resolve_neg()
    torch.testing.assert_close(pcf.ops.linear(plain, weight), F.linear(plain, weight), **CLOSE)


def test_constants_that_compare_equal_are_told_apart(device: torch.device) -> None:
    x, weight = torch.ones(2, 3, device=device), torch.ones(4, 3, device=device)
    for _ in range(2):
        for constant in (0.0, -0.0):
            result = pcf.ops.linear(x, weight, epilogue=(pcf.mul(constant),))
            assert bool((torch.signbit(result) == (str(constant) == "-0.0")).all())


@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, None])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_linear_batch_norm(
    momentum: float | None, training: bool, affine: bool, device: torch.device
) -> None:
    x, weight, bias = data(SizeCase((12,), 5, 4), device)
    norm = torch.nn.BatchNorm1d(4, momentum=momentum, affine=affine, device=device).train(training)
    mean, var = torch.zeros(4, device=device), torch.ones(4, device=device)
    count = torch.tensor(0, device=device)
    for step in range(3):
        expected = norm(F.linear(x + step, weight, bias) * 0.5).relu()
        result = pcf.ops.linear_batch_norm(
            x + step,
            weight,
            bias,
            epilogue=(pcf.mul(0.5),),
            running_mean=mean,
            running_var=var,
            num_batches_tracked=count,
            bn_weight=norm.weight,
            bn_bias=norm.bias,
            training=training,
            momentum=momentum,
            after=(pcf.relu(),),
        )
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mean, norm.running_mean, **CLOSE)
        torch.testing.assert_close(var, norm.running_var, **CLOSE)
        assert count == norm.num_batches_tracked
