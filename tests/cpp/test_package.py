"""What the Python package and the library must agree on."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse import config
from pycutfuse.ops import _launch
from pycutfuse.ops import _linear as linear_module
from pycutfuse.program import EMPTY, MAX_STEPS, OPS, describe, encode, library_codes, operands_of

from ..cases.programs import PROGRAMS, ProgramCase
from ..ops.simulated import Binding, install
from .native import binding

_C = binding()


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Binding]:
    yield install(monkeypatch)
    _launch.clear_caches()


def call(x: Tensor, weight: Tensor) -> Tensor:
    head = (x, weight, None, None, list(EMPTY.codes), list(EMPTY.constants))
    return linear_module._forward_cuda(*head, [], "ieee")


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_the_library_reads_the_same_program(program: ProgramCase) -> None:
    steps = program.build(program.operands(3, 3))
    encoded = encode(steps)
    codes = library_codes(encoded.codes)
    made = _C.Program(codes, encoded.constants)
    made.validate(len(operands_of(steps)))
    assert len(made) == len(steps)
    assert repr(made) == describe(codes, encoded.constants) or not steps


def test_operations_are_numbered_as_in_the_library() -> None:
    assert _C.OPS == OPS
    assert _C.MAX_STEPS == MAX_STEPS


def test_k_below_64_is_handed_over_before_a_reduction(
    simulated: Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, hopper = _C.Program([], []), _C.DeviceProps()

    def why_not(problem: Any, _: object) -> str | None:
        sizes = problem.m, problem.n, problem.k
        return _C.why_not(_C.FusedProblem(*sizes, empty, problem.tail, empty, 0, 0), hopper)

    monkeypatch.setattr(simulated, "why_not", why_not)
    reason = "K=63: the accuracy promise was measured from K=64 on; PyTorch runs below"
    x, weight = draw(2, 63), draw(3, 63)
    found = pcf.explain(pcf.ops.linear_logsumexp, x, weight)
    assert (found.path, found.reason) == ("hand-over", reason)
    expected = F.linear(x, weight).logsumexp(-1)
    torch.testing.assert_close(pcf.ops.linear_logsumexp(x, weight), expected)
    assert config.counters() == {"fallback": {}, "handover": {f"linear_logsumexp: {reason}": 1}}
    call(x, weight)
    assert simulated.launched == 1
