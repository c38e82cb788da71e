"""Errors are measured against float64 by two metrics, and the rule compares them with PyTorch's."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pycutfuse.bench.accuracy import Check, Errors, compare, limit_for, reference_with_scale


def _linear(n=5, k=7):
    torch.manual_seed(0)
    return nn.Linear(k, n).double(), torch.randn(6, k, dtype=torch.float64)


def test_scale_of_a_linear_layer_is_the_product_of_absolute_values():
    linear, x = _linear()
    (out,), (scale,) = reference_with_scale(lambda: linear(x))
    assert torch.equal(out, linear(x))
    expected = x.abs() @ linear.weight.abs().T + linear.bias.abs()
    torch.testing.assert_close(scale, expected)


@pytest.mark.parametrize(
    ("after", "slope"),
    [(torch.relu, 1.0), (lambda v: 3 * v, 3.0), (lambda v: torch.clamp(v, -0.1, 0.1), 1.0)],
)
def test_scale_does_not_vanish_where_a_step_is_flat(after, slope):
    linear, x = _linear(n=3)
    x = torch.cat([x, -x])  # every channel has positive values
    _, (plain,) = reference_with_scale(lambda: linear(x))
    _, (scale,) = reference_with_scale(lambda: after(linear(x)))
    torch.testing.assert_close(scale, slope * plain)


def test_scale_follows_batch_normalisation():
    linear, x = _linear(k=32)
    x = torch.randn(2000, 32, dtype=torch.float64)
    bn = nn.BatchNorm1d(5).double()
    (out,), (scale,) = reference_with_scale(lambda: bn(linear(x)))
    z = linear(x)
    expected = (x.abs() @ linear.weight.abs().T + linear.bias.abs()) / z.std(0)
    torch.testing.assert_close(scale, torch.maximum(expected, out.abs()), rtol=0.25, atol=0)
    assert bn.num_batches_tracked == 1


@pytest.mark.parametrize("module", [nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(3, 4, 3)])
def test_scale_of_convolutions(module):
    module = module.double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    _, (scale,) = reference_with_scale(lambda: module(x))
    absolute = type(module)(3, 4, 3).double()
    absolute.load_state_dict({k: v.abs() for k, v in module.state_dict().items()})
    torch.testing.assert_close(scale, absolute(x.abs()).detach())


def test_scale_of_a_reduction_is_positive_and_shaped_as_the_result():
    linear, x = _linear()
    (out,), (scale,) = reference_with_scale(lambda: torch.logsumexp(torch.sigmoid(linear(x)), 1))
    assert scale.shape == out.shape
    assert (scale >= out.abs()).all()


def test_float32_result_has_small_errors_and_a_perturbed_one_the_known_ones():
    linear, x = _linear()
    linear.requires_grad_(False)
    (reference,), (scale,) = reference_with_scale(lambda: linear(x))
    theirs = F.linear(x.float(), linear.weight.float(), linear.bias.float())
    good = compare("good", theirs.clone(), theirs, reference, scale)
    assert good.passed
    assert 0 < good.ours.frobenius < 1e-6
    wrong = theirs * (1 + 1e-3)
    bad = compare("bad", wrong, theirs, reference, scale)
    assert bad.ours.frobenius == pytest.approx(1e-3, rel=1e-2)
    assert not bad.passed


def test_a_single_wrong_element_fails_even_where_the_norm_hides_it():
    reference = torch.ones(1000, 1000, dtype=torch.float64)
    theirs = reference.float()
    ours = theirs.clone()
    ours[3, 4] += 1e-5
    check = compare("one", ours, theirs, reference, reference)
    assert check.ours.frobenius < check.limit
    assert not check.passed


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_where_pytorch_is_finite_fails_and_the_other_way_round(value):
    reference = torch.ones(4, dtype=torch.float64)
    clean, spoiled = torch.ones(4), torch.tensor([1.0, value, 1.0, 1.0])
    assert not compare("ours", spoiled, clean, reference, reference).passed
    assert not compare("theirs", clean, spoiled, reference, reference).passed
    assert compare("both", spoiled.clone(), spoiled, reference, reference).passed
    for other in {math.nan, math.inf, -math.inf} - {value}:
        different = torch.tensor([1.0, other, 1.0, 1.0])
        assert not compare("another kind", different, spoiled, reference, reference).passed


def test_shape_or_dtype_that_differs_fails():
    reference = torch.ones(4, dtype=torch.float64)
    assert not compare("shape", torch.ones(4, 1), torch.ones(4), reference).passed
    assert not compare("dtype", torch.ones(4).half(), torch.ones(4), reference).passed


@pytest.mark.parametrize(
    ("ours", "theirs", "passed"),
    [
        (2.0**-22, 0.0, True),
        (2.0**-21, 0.0, False),
        (2.0**-21, 2.0**-21, True),
        (2.0**-20, 2.0**-21, False),
        (math.nan, 1.0, False),
        (math.inf, 1.0, False),
    ],
)
def test_rule_is_the_larger_of_pytorchs_error_and_the_limit(ours, theirs, passed):
    limit = limit_for(torch.float32)
    for metric in (
        Check("f", Errors(ours, 0.0), Errors(theirs, 0.0), limit),
        Check("c", Errors(0.0, ours), Errors(0.0, theirs), limit),
    ):
        assert metric.passed is passed


def test_limits_by_dtype():
    assert limit_for(torch.float32) == 2.0**-22
    assert limit_for(torch.float16) == 2.0**-11
    assert limit_for(torch.bfloat16) == 2.0**-8


def test_empty_results_pass():
    empty = torch.empty(0, 5)
    assert compare("empty", empty, empty, empty.double(), empty.double()).passed
