"""The vector-Jacobian product is torch.autograd's, at kinks, at infinities and for NaN too."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .cases import CASES, Case
from .native import SPECIAL, binding, program

_C = binding()

KINKS = (-6.0, -3.0, -1.0, 0.0, -0.0, 1.0, 2.0, 3.0, 6.0, 10.0, 20.0)
# Both sides of every kink, in fp32.
AROUND = torch.cat(
    [torch.nextafter(torch.tensor(KINKS), torch.tensor(end)) for end in (-1e9, 1e9)]
).tolist()
GRADS = (1.0, -0.375)


def torch_gradient(case: Case, values: list[float], grad: float) -> Tensor:
    leaf = torch.tensor(values, requires_grad=True)
    (result,) = torch.autograd.grad(case.function(leaf), leaf, torch.full((len(values),), grad))
    return result


def settled(case: Case, values: Iterable[float]) -> list[float]:
    """`values` without the bounds where torch's gradient is another one since 2.14."""
    name, *bounds = case.step
    moved = name in {"clamp", "minimum", "maximum"} and torch.__version__ >= "2.14"
    return [value for value in values if not (moved and value in bounds)]


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_is_autograds(case: Case, grad: float) -> None:
    values = settled(case, [*KINKS, *AROUND, *torch.linspace(-25, 25, 401).tolist()])
    made = program(case.step)
    ours = [made.vjp(value, [], grad)[0] for value in values]
    expected = torch_gradient(case, values, grad).numpy()
    # One ulp of tanh or erf near 1 is multiplied by v, up to 25, in torch as here.
    np.testing.assert_allclose(ours, expected, rtol=2e-6, atol=4e-6 if case.cancels else 4e-7)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_of_special_value_is_autograds(case: Case) -> None:
    values = settled(case, SPECIAL)
    made = program(case.step)
    ours = [made.vjp(value, [], 1.0)[0] for value in values]
    expected = torch_gradient(case, values, 1.0).numpy()
    np.testing.assert_allclose(ours, expected, rtol=2e-6, atol=4e-7)


@pytest.mark.parametrize(
    ("step", "value", "expected"),
    [
        (("relu",), 0.0, 0.0),
        (("leaky_relu", 0.25), 0.0, 0.25),
        (("clamp", -1.0, 2.0), -1.0, 1.0),
        (("clamp", -1.0, 2.0), 2.0, 1.0),
        (("minimum", 2.0), 2.0, 1.0),
        (("maximum", 2.0), 2.0, 1.0),
        (("hardswish",), -3.0, 0.0),
        (("hardswish",), 3.0, 1.0),
    ],
)
def test_convention_at_a_kink(step: tuple[object, ...], value: float, expected: float) -> None:
    assert program(step).vjp(value, [], 1.0)[0] == expected


def test_softplus_gradient_does_not_overflow_below_a_high_threshold() -> None:
    assert program(("softplus", 1.0, 200.0)).vjp(150.0, [], 1.0)[0] == 1.0


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_operand_gradient_is_autograds(name: str) -> None:
    function = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}[name]
    made = program((name, "operand", 0))
    for value in SPECIAL:
        for other in (0.0, -0.0, 0.75, -3.0, 1e-20, math.inf, math.nan):
            leaves = [torch.tensor([item], requires_grad=True) for item in (value, other)]
            expected = torch.autograd.grad(function(*leaves), leaves, torch.tensor([0.5]))
            ours, (operand_grad,) = made.vjp(value, [other], 0.5)
            np.testing.assert_allclose(ours, expected[0].item(), rtol=1e-6)
            np.testing.assert_allclose(operand_grad, expected[1].item(), rtol=1e-6)


def test_operand_of_several_steps_gathers_all_their_gradients() -> None:
    made = program(
        ("add", "operand", 0),
        ("mul", "operand", 1),
        ("gelu_tanh",),
        ("sub", "operand", 0),
        ("div", "operand", 1),
        ("sigmoid",),
    )
    leaves = [torch.tensor(item, requires_grad=True) for item in (0.3, -0.7, 1.9)]
    value, first, second = leaves
    result = F.gelu((value + first) * second, approximate="tanh")
    result = torch.sigmoid((result - first) / second)
    expected = [item.item() for item in torch.autograd.grad(result, leaves, torch.tensor(2.5))]
    grad, operand_grads = made.vjp(value.item(), [first.item(), second.item()], 2.5)
    np.testing.assert_allclose([grad, *operand_grads], expected, rtol=1e-5)


def test_operand_that_no_step_reads_has_gradient_zero() -> None:
    assert program(("mul", "operand", 1)).vjp(2.0, [5.0, 3.0], 1.0) == (3.0, [0.0, 2.0])


def test_empty_program_passes_the_gradient_on() -> None:
    assert program().vjp(2.0, [], 0.25) == (0.25, [])
