"""A Status keeps its code and as much of its text as fits, and the checks return it."""

import pytest

from .native import host_module

host = host_module()

OK, INVALID_VALUE, INVALID_SHAPE, CUDA = 0, 1, 2, 6


def test_text_is_formatted() -> None:
    assert host.error(INVALID_VALUE, "weight has", 30) == (INVALID_VALUE, "weight has: 30")


@pytest.mark.parametrize("length", [507, 508, 509, 2000])
def test_long_text_is_cut_and_stays_terminated(length: int) -> None:
    _, text = host.error(INVALID_VALUE, "x" * length, 7)
    assert text == ("x" * length + ": 7")[: host.MESSAGE_BYTES - 1]


def test_percent_in_an_argument_is_no_format() -> None:
    assert host.error(INVALID_VALUE, "%s %n", 1)[1] == "%s %n: 1"


def test_every_code_has_a_name() -> None:
    names = [host.code_name(code) for code in range(8)]
    assert names[0] == "ok"
    assert len(set(names)) == 8
    assert host.code_name(8) == host.code_name(-1) == "unknown code"


def test_check_returns_ok_or_the_formatted_status() -> None:
    assert host.check_below(1, 2) == (OK, "")
    assert host.check_below(2, 2) == (INVALID_SHAPE, "value is 2 but the limit is 2")


def test_cuda_check_names_call_error_and_remedy() -> None:
    assert host.check_cuda(0) == (OK, "")
    code, text = host.check_cuda(209)
    assert code == CUDA
    for word in ("result", "cudaErrorNoKernelImageForDevice", "no kernel image", "build pycutfuse"):
        assert word in text
