"""An invalid program raises torch's type of exception with value, limit and remedy in the text."""

from typing import Any

import pytest

from .native import NAN, binding, program

_C = binding()
OPS = _C.OPS


@pytest.mark.parametrize(
    ("codes", "constants", "words"),
    [
        ([99, -1], [0, 0], ["step 0", "99", "0 to 16", "take codes"]),
        ([6, -1, -7, -1], [0] * 4, ["step 1", "-7", "0 to 16"]),
        ([2**40, -1], [0, 0], ["1099511627776", "0 to 16"]),
        ([6, -1] * 17, [0] * 34, ["17 steps", "16", "before or after"]),
        ([6], [0], ["1 codes", "two"]),
        ([6, -1], [0], ["1 constants", "1 steps", "two"]),
        ([6, -1], [0, 0, 0, 0], ["4 constants", "two"]),
        ([OPS["relu"], 0], [0, 0], ["step 0", "relu", "operand 0", "add, sub, mul and div"]),
        ([OPS["minimum"], 2], [0, 0], ["minimum", "operand 2", "constants"]),
        ([OPS["add"], -2], [0, 0], ["step 0", "operand -2", "-1"]),
        ([OPS["add"], 2**31], [0, 0], ["2147483648", "2147483647"]),
        ([OPS["clamp"], -1], [NAN, 1], ["clamp", "nan", "numbers", "infinities"]),
        ([OPS["clamp"], -1], [0, NAN], ["clamp", "nan", "numbers", "infinities"]),
        ([OPS["minimum"], -1], [NAN, 0], ["minimum", "nan", "numbers", "infinities"]),
        ([OPS["maximum"], -1], [NAN, 0], ["maximum", "nan", "numbers", "infinities"]),
    ],
)
def test_malformed_program(codes: list[int], constants: list[float], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"step|codes|constants") as caught:
        _C.Program(codes, constants)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("codes", "constants", "words"),
    [
        (None, [], ["codes", "NoneType", "sequence"]),
        ("66", [], ["codes", "str", "sequence"]),
        ([1.5, -1], [0, 0], ["codes[0]", "float", "int"]),
        ([6, None], [0, 0], ["codes[1]", "NoneType", "int"]),
        ([6, -1], [0, "x"], ["constants[1]", "str", "number"]),
        ([6, -1], [[], 0], ["constants[0]", "list", "number"]),
    ],
)
def test_wrong_kind_of_argument(codes: Any, constants: Any, words: list[str]) -> None:
    with pytest.raises(TypeError) as caught:
        _C.Program(codes, constants)
    for word in words:
        assert word in str(caught.value)


def test_code_beyond_64_bits() -> None:
    with pytest.raises(OverflowError):
        _C.Program([2**70, -1], [0, 0])


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_operands(count: int) -> None:
    made = program(("add", "operand", 0), ("mul", "operand", 2))
    words = [f"operand {0 if count == 0 else 2}", f"{count} operands", "at least"]
    calls = (
        lambda: made.validate(count),
        lambda: made.run(1.0, [1.0] * count),
        lambda: made.vjp(1.0, [1.0] * count, 1.0),
    )
    for call in calls:
        with pytest.raises(ValueError, match="operand") as caught:
            call()
        for word in words:
            assert word in str(caught.value)


def test_enough_operands() -> None:
    program(("add", "operand", 0), ("mul", "operand", 2)).validate(3)


def test_sequences_of_any_kind_are_taken() -> None:
    class Codes:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            if index >= 2:
                raise IndexError
            return (OPS["mul"], -1)[index]

    assert _C.Program(Codes(), (2, 0)) == program(("mul", 2.0))
    assert _C.Program((), []) == program()
