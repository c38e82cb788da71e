"""Problems that PyTorch is expected to run faster go to PyTorch: counted, explained, not warned."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import pycutfuse as pcf
from pycutfuse import reference
from pycutfuse.ops import _launch, _linear, _linear_logsumexp
from pycutfuse.testing import slow_problems_taken
from pycutfuse.testing.forcing import KINDS, Kind

from .simulated import Binding, install

pytestmark = pytest.mark.hands_over

SLOWER = "expected to be faster"
LIMIT = 1000  # multiplications below which the simulated binding hands over


class Impatient(Binding):
    """Hands small problems over."""

    def why_slower(self, problem: Any, device: object) -> str | None:
        small = problem.m * problem.n * problem.k < LIMIT
        return f"PyTorch's kernels are {SLOWER}" if small else None


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Impatient]:
    made = install(monkeypatch)
    made.__class__ = Impatient
    for module in (_linear, _linear_logsumexp):
        monkeypatch.setattr(module, "_forward_op", module._forward_cuda)
    yield made
    _launch.clear_caches()


SMALL = torch.ones(2, 3), torch.ones(4, 3)
LARGE = torch.ones(20, 30), torch.ones(40, 30)


def test_a_small_call_is_counted_and_is_torchs(binding: Impatient) -> None:
    pcf.set_fallback_policy("error")  # a hand-over is no fallback
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert torch.equal(pcf.ops.linear(*SMALL), F.linear(*SMALL))
    assert pcf.counters() == {
        "fallback": {},
        "handover": {f"linear: PyTorch's kernels are {SLOWER}": 2},
    }
    assert binding.launched == binding.planned == 0


@pytest.mark.parametrize("operator", ["linear", "linear_logsumexp"])
def test_a_known_small_call_takes_the_short_way(
    operator: str, binding: Impatient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError("through the dispatcher")

    call, plain = getattr(pcf.ops, operator), getattr(reference, operator)
    call(*SMALL)
    for module in (_linear, _linear_logsumexp):
        monkeypatch.setattr(module, "_forward_op", unexpected)
    torch.testing.assert_close(call(*SMALL), plain(*SMALL, (), (), ()))
    assert sum(pcf.counters()["handover"].values()) == 2


def test_what_autograd_records_saves_the_same_each_time(binding: Impatient) -> None:
    """Or checkpointing refuses the second run: the first one goes through the operator."""
    x, weight = (tensor.clone().requires_grad_() for tensor in SMALL)

    def call() -> torch.Tensor:
        return pcf.ops.linear(x, weight).sigmoid()

    checkpoint(call, use_reentrant=False).sum().backward()
    (expected,) = torch.autograd.grad(F.linear(x, weight).sigmoid().sum(), x)
    torch.testing.assert_close(x.grad, expected)


def test_a_large_call_is_launched(binding: Impatient) -> None:
    torch.testing.assert_close(pcf.ops.linear(*LARGE), F.linear(*LARGE))
    assert pcf.counters() == {"fallback": {}, "handover": {}}
    assert binding.launched == 1


def test_explain_shows_the_reason(binding: Impatient) -> None:
    found = pcf.explain(pcf.ops.linear, *SMALL)
    assert (found.path, found.reason) == ("hand-over", f"PyTorch's kernels are {SLOWER}")
    assert pcf.explain(pcf.ops.linear, *LARGE).path == "fused"


def test_tests_may_take_them(binding: Impatient) -> None:
    with slow_problems_taken():
        pcf.ops.linear(*SMALL)
        assert pcf.explain(pcf.ops.linear, *SMALL).path == "fused"
    assert binding.launched == 1
    pcf.ops.linear(*SMALL)  # what was planned is not kept
    assert binding.launched == 1


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_on_the_gpu(kind: Kind, cuda: torch.device) -> None:
    dtype, tier = kind
    x, weight = (torch.ones(size, 64, device=cuda, dtype=dtype) for size in (2, 4))
    assert SLOWER in str(pcf.explain(pcf.ops.linear, x, weight, precision=tier).reason)
    pcf.ops.linear(x, weight, precision=tier)
    (reason,) = pcf.counters()["handover"]
    assert SLOWER in reason
    with slow_problems_taken():
        assert pcf.explain(pcf.ops.linear, x, weight, precision=tier).path == "fused"
