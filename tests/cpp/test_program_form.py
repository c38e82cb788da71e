"""A program compares, prints and canonicalises; canonical form changes no bit of any result."""

from typing import Any

import pytest

from .native import INF, NAN, NORMAL, SPECIAL, TINY, binding, bits, program

_C = binding()

CONSTANTS = (
    *(0.0, -0.0, 1.0, -1.0, 2.0, -0.5, 3.0, 0.1, 2.0**126, 2.0**127, -(2.0**127), 1e38),
    *(TINY, NORMAL, 2.0**-127, 2.0**-128, 2.0**-129, 1e-40, INF, -INF, NAN),
)
VALUES = (*SPECIAL, 0.1, -7.3, 2.0**-120, 1.5 * TINY, 3.0 * NORMAL, 1e30)


@pytest.mark.parametrize("constant", CONSTANTS)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_canonical_form_changes_no_bit(name: str, constant: float) -> None:
    made = program((name, constant))
    canonical = made.canonicalise()
    for value in VALUES:
        assert bits(canonical.run(value, [])) == bits(made.run(value, [])), value


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (("mul", 1.0), "identity"),
        (("div", 1.0), "identity"),
        (("sub", 0.5), "add(-0.5)"),
        (("div", 4.0), "mul(0.25)"),
        (("div", -0.5), "mul(-2)"),
        (("div", 3.0), "div(3)"),
        (("div", 0.0), "div(0)"),
        (("div", INF), "div(inf)"),
        (("div", 2.0**-149), "div(1e-45)"),
        (("mul", "operand", 0), "mul(operand 0)"),
        (("sub", "operand", 0), "sub(operand 0)"),
        (("sigmoid",), "sigmoid"),
    ],
)
def test_canonical_form(step: tuple[Any, ...], text: str) -> None:
    canonical = program(step).canonicalise()
    assert repr(canonical) == text
    canonical.validate(1)
    assert canonical.canonicalise() == canonical


def test_canonical_form_drops_a_step_from_the_middle() -> None:
    made = program(("add", "operand", 0), ("mul", 1.0), ("relu",), ("div", 8.0))
    assert made.canonicalise() == program(("add", "operand", 0), ("relu",), ("mul", 0.125))


def test_printed_program_is_one_line_in_torchs_words() -> None:
    made = program(
        *(("add", "operand", 0), ("mul", 2.0), ("sigmoid",), ("clamp", -1.0, 0.1)),
        *(("leaky_relu", 0.01), ("softplus", 1.0, 20.0), ("minimum", 3e38), ("gelu_tanh",)),
    )
    assert repr(made) == (
        "add(operand 0) | mul(2) | sigmoid | clamp(-1, 0.1) | leaky_relu(0.01) | softplus(1, 20)"
        " | minimum(3e+38) | gelu_tanh"
    )


def test_printed_constant_reads_back_as_itself() -> None:
    for value in (1.0 / 3.0, 16777217.0, TINY, 1.1):
        made = program(("add", value))
        assert program(("add", float(repr(made)[4:-1]))) == made


def test_empty_program_prints_as_identity() -> None:
    assert repr(program()) == "identity"
    assert len(program()) == 0


def test_length_is_the_number_of_steps() -> None:
    assert len(program(("relu",), ("tanh",))) == 2


def test_programs_compare_by_steps_operands_and_constants() -> None:
    assert program(("mul", 2.0), ("relu",)) == program(("mul", 2.0), ("relu",))
    assert program(("mul", 2.0)) != program(("mul", 3.0))
    assert program(("mul", 2.0)) != program(("div", 2.0))
    assert program(("mul", "operand", 0)) != program(("mul", "operand", 1))
    assert program(("relu",)) != program(("relu",), ("relu",))
    assert program(("relu",)) != "relu"


def test_programs_compare_by_bits() -> None:
    assert program(("mul", NAN)) == program(("mul", NAN))
    assert program(("mul", 0.0)) != program(("mul", -0.0))


def test_constant_that_an_op_does_not_read_is_dropped() -> None:
    assert _C.Program([_C.OPS["relu"], -1], [5.0, 7.0]) == program(("relu",))


def test_codes_are_the_enumerations() -> None:
    assert list(_C.OPS.values()) == list(range(17))
    assert list(_C.OPS)[:4] == ["add", "sub", "mul", "div"]
    assert _C.MAX_STEPS == 16
