"""Programs: their encoding, their agreement with the library's, their words."""

import dataclasses

import pytest
import torch

import pycutfuse as pcf
from pycutfuse.program import describe, encode, operands_of


def test_operands_are_numbered_in_order_after_the_bias() -> None:
    first, second = torch.ones(3), torch.ones(())
    program = (pcf.mul(first), pcf.relu(), pcf.sub(0.5), pcf.add(second))
    encoded = encode(program, bias=True)
    assert encoded.codes == (0, 0, 2, 1, 6, -1, 1, -1, 0, 2)
    assert encoded.constants == (0, 0, 0, 0, 0, 0, 0.5, 0, 0, 0)
    found = operands_of(program)
    assert found[0] is first
    assert found[1] is second


def test_a_zero_dimensional_tensor_stays_an_operand() -> None:
    assert pcf.mul(torch.tensor(2.0)).operand is not None
    assert pcf.mul(2).constants == (2.0, 0.0)


def test_numbers_of_other_libraries_are_constants() -> None:
    from fractions import Fraction

    assert pcf.mul(Fraction(1, 2)).constants == (0.5, 0.0)


def test_steps_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        pcf.relu().op = "tanh"


def test_keys_tell_zeros_and_nans_apart() -> None:
    keys = [encode((pcf.add(value),)).key for value in (0.0, -0.0, float("nan"))]
    assert len(set(keys)) == 3
    assert encode((pcf.add(float("nan")),)).key == keys[2]


def test_a_program_reads_as_one_line() -> None:
    program = (pcf.mul(torch.ones(3)), pcf.mul(2.0), pcf.sigmoid(), pcf.clamp(0.0, 6.0))
    encoded = encode(program)
    text = "mul(operand 0) | mul(2) | sigmoid | clamp(0, 6)"
    assert describe(encoded.codes, encoded.constants) == text
