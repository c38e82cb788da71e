"""Who is expected to be faster is a pure function of the problem."""

import math

import pytest
import torch

from pycutfuse.bench import host
from pycutfuse.program import EMPTY
from pycutfuse.support import Problem, fused_problem
from pycutfuse.testing.forcing import KINDS, Kind

from .native import binding

_C = binding()

TAILS = ["none", "batch_norm_train", "batch_norm_eval", "logsumexp"]
SLOWER = "expected to be faster"


def slower(m: int, n: int, k: int, kind: Kind, tail: str = "none") -> str | None:
    """What the library says of a problem on an H200, which needs no GPU to be asked."""
    dtype, tier = kind
    leading = (0, 0) if dtype is torch.float32 else (8 * math.ceil(k / 8),) * 2
    problem = Problem(m, n, k, EMPTY, tail, EMPTY, tier, dtype, False, *leading, 0)
    reason: str | None = _C.why_slower(fused_problem(problem), _C.DeviceProps())
    return reason


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_a_tiny_problem_is_slower(kind: Kind, tail: str) -> None:
    for sizes in ((1, 1, 1), (2, 4, 64), (16, 16, 128)):
        assert SLOWER in str(slower(*sizes, kind, tail))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_a_large_problem_is_not(kind: Kind, tail: str) -> None:
    assert slower(16384, 4096, 4096, kind, tail) is None


@pytest.mark.parametrize("tail", ["none", "batch_norm_train"])
def test_the_hosts_overhead_is_measured_on_a_problem_that_is_ours(tail: str) -> None:
    m, k, n = host.SHAPE.sizes
    assert slower(m, n, k, (torch.float32, "ieee"), tail) is None


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_reason_has_the_sizes_and_both_times(kind: Kind) -> None:
    reason = str(slower(2, 4, 64, kind))
    assert reason.startswith("2x4x64 ")
    assert "us)" in reason
