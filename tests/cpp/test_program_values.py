"""Every op gives torch's value: on ordinary numbers, on special ones, and in chains."""

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from .cases import CASES, Case
from .native import INF, NAN, SPECIAL, binding, program, values_of

_C = binding()
ULPS = 4  # of the float64 result


def ordinary() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    spread = torch.rand(1500, generator=generator) * 40 - 20
    near_zero = torch.randn(500, generator=generator) * torch.logspace(-30, 0, 500)
    kinks = torch.tensor([-3.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0, 6.0, 10.0, 20.0])
    return torch.cat([spread, near_zero, kinks, torch.nextafter(kinks, torch.tensor(0.0))])


ORDINARY = ordinary()


def test_every_op_has_a_case() -> None:
    assert {case.step[0] for case in CASES} == set(_C.OPS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_value_is_as_close_to_float64_as_torch_or_within_a_few_ulp(case: Case) -> None:
    ours = np.array(values_of(program(case.step), ORDINARY.tolist()))
    theirs = case.function(ORDINARY).double().numpy()
    exact = case.function(ORDINARY.double()).numpy()
    with np.errstate(over="ignore"):
        exact32 = exact.astype(np.float32)
    assert (np.isfinite(ours) == np.isfinite(theirs)).all()
    at = np.isfinite(exact32)
    allowed = ULPS * np.spacing(np.abs(exact32[at])).astype(np.float64)
    if case.cancels:
        allowed = np.maximum(allowed, 2.0**-23 * np.abs(ORDINARY.numpy()[at]))
    allowed = np.maximum(allowed, np.abs(theirs[at] - exact[at]))
    error = np.abs(ours[at] - exact[at])
    assert (error <= allowed).all(), ORDINARY.numpy()[at][np.argmax(error / allowed)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_special_value_is_torchs(case: Case) -> None:
    for value in SPECIAL:
        if case.step[0] == "gelu_erf" and value == INF:
            continue  # torch's CPU kernel says NaN there, its CUDA kernel inf
        expected = case.function(torch.tensor([value])).item()
        ours = program(case.step).run(value, [])
        assert math.isnan(ours) == math.isnan(expected), value
        if not math.isnan(expected):
            # torch's sigmoid and silu drop to zero below v = -88.7, where ours still has a value.
            floor = 3e-37 if case.step[0] in ("sigmoid", "silu") and value < -80 else 1e-44
            assert ours == pytest.approx(expected, rel=1e-6, abs=floor), value


def test_gelu_of_infinity_is_infinity() -> None:
    assert program(("gelu_erf",)).run(INF, []) == INF


def test_softplus_does_not_overflow_below_a_high_threshold() -> None:
    assert program(("softplus", 1.0, 200.0)).run(150.0, []) == 150.0


@pytest.mark.parametrize(
    ("name", "bound"), [("relu", ()), ("maximum", (0.0,)), ("clamp", (0.0, 1.0))]
)
def test_maximum_of_the_two_zeros_is_plus_zero(name: str, bound: tuple[float, ...]) -> None:
    # As the GPU's instruction and torch on CUDA have it; torch on the CPU keeps -0.
    assert math.copysign(1.0, program((name, *bound)).run(-0.0, [])) == 1.0


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_binary_op_is_correctly_rounded(name: str) -> None:
    function = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}[name]
    made = program((name, "operand", 0))
    others = ORDINARY.flip(0)
    expected = function(ORDINARY, others).tolist()
    pairs = zip(ORDINARY.tolist(), others.tolist(), strict=True)
    assert [made.run(value, [other]) for value, other in pairs] == expected


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_binary_op_of_special_operands_is_torchs(name: str) -> None:
    function = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}[name]
    made = program((name, "operand", 0))
    for value in SPECIAL:
        others = torch.tensor(SPECIAL)
        expected = function(torch.full_like(others, value), others).tolist()
        ours = [made.run(value, [other]) for other in SPECIAL]
        np.testing.assert_array_equal(ours, expected)
        np.testing.assert_array_equal(  # the sign of a zero too
            [math.copysign(1.0, v) for v in ours if not math.isnan(v)],
            [math.copysign(1.0, v) for v in expected if not math.isnan(v)],
        )


@pytest.mark.parametrize("seed", range(20))
def test_chain_of_steps_runs_in_order(seed: int) -> None:
    shuffled = random.Random(seed)
    chosen = [shuffled.choice([c for c in CASES if NAN not in c.step]) for _ in range(_C.MAX_STEPS)]
    value = torch.tensor([0.37 * (seed - 9)])
    expected = value
    ours = float(value)
    for case in chosen:
        expected = case.function(expected)
        ours = program(case.step).run(ours, [])
    made = program(*(case.step for case in chosen))
    np.testing.assert_array_equal(made.run(float(value), []), ours)
    np.testing.assert_allclose(ours, expected.item(), rtol=1e-4, atol=1e-30)


def test_empty_program_returns_its_value() -> None:
    assert values_of(program(), [1.5, -0.0, INF]) == [1.5, -0.0, INF]
