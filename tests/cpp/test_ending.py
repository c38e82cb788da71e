"""What of a program a store may run: a sigmoid at its end, and one product or sum after it."""

import math

import pytest

from pycutfuse.program import OPS

from .native import bits, host_module, program

host = host_module()


def ending_of(*steps: tuple) -> tuple[int, float, float] | None:
    """(first step, factor, term) of steps (name, constant); a third value is an operand."""
    encoded = []
    for name, *rest in steps:
        constant, operand = (*rest, *(0.0, -1)[len(rest) :])
        encoded.append((OPS[name], int(operand), constant))
    found: tuple[int, float, float] | None = host.ending_of(encoded)
    return found


SIGMOID = ("sigmoid",)


@pytest.mark.parametrize(
    ("steps", "ending"),
    [
        ((SIGMOID,), (0, 1.0, -0.0)),
        ((("add", 0.5), SIGMOID), (1, 1.0, -0.0)),
        ((SIGMOID, ("mul", 2.0)), (0, 2.0, -0.0)),
        ((("relu",), SIGMOID, ("add", 0.25)), (1, 1.0, 0.25)),
        ((SIGMOID, ("sub", 0.25)), (0, 1.0, -0.25)),
        ((SIGMOID, SIGMOID), (1, 1.0, -0.0)),
    ],
)
def test_ending(steps: tuple, ending: tuple[int, float, float]) -> None:
    found = ending_of(*steps)
    assert found == ending
    assert math.copysign(1.0, found[2]) == math.copysign(1.0, ending[2])  # -0 changes no sum


@pytest.mark.parametrize(
    "steps",
    [
        (),
        (("mul", 2.0),),
        (("tanh",),),
        (SIGMOID, ("tanh",)),
        (SIGMOID, ("mul", 0.0, 0)),  # by an operand
        (SIGMOID, ("div", 3.0)),
        (SIGMOID, ("mul", 2.0), ("add", 1.0)),
        (SIGMOID, ("maximum", 0.5)),
    ],
)
def test_no_ending(steps: tuple) -> None:
    assert ending_of(*steps) is None


@pytest.mark.parametrize("step", [("mul", -0.3), ("add", 0.7), ("sub", 0.1), ("sub", 0.0)])
def test_factor_and_term_are_the_step(step: tuple[str, float]) -> None:
    _, factor, term = ending_of(SIGMOID, step)
    for value in (0.0, -0.0, 0.375, 1.0, math.nan):
        expected = program(step).run(value, [])
        # Exact before it is rounded to a float: one of the two is neutral.
        assert bits(value * factor + term) == bits(expected), value
