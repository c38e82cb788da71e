"""Forced policies: which are taken, and that one that fails is a failed result without speed."""

from types import SimpleNamespace

import pytest
import torch

from pycutfuse._loader import Native
from pycutfuse.bench import forced
from pycutfuse.bench.case import ForcedCase
from pycutfuse.bench.runner import Options
from pycutfuse.bench.shapes import Shape

CASE = ForcedCase("sm80", Shape(8, 8, 8), 80)
CUDA = torch.device("cuda")


def _policy(arch, promote_k, tile_n=128):
    return SimpleNamespace(arch=arch, promote_k=promote_k, tile_m=128, tile_n=tile_n)


@pytest.fixture
def compiled(monkeypatch):
    def make(*policies):
        binding = SimpleNamespace(compiled_policies=lambda: list(policies))
        monkeypatch.setattr(forced, "native", lambda: Native(binding, None))

    return make


def test_only_promoting_policies_of_the_architecture_are_taken(compiled):
    wanted = [_policy(80, 16), _policy(80, 64)]
    compiled(_policy(90, 64), *wanted, _policy(80, 0))
    assert forced.policies(80) == wanted
    assert forced.why_skipped(CASE, CUDA) is None


def test_where_none_is_compiled_it_is_said(compiled):
    compiled(_policy(90, 64), _policy(80, 0))
    assert forced.why_skipped(CASE, CUDA) == "no ieee policy of architecture 80 is compiled"
    assert forced.why_skipped(CASE, torch.device("cpu")) == "no GPU"


def test_without_the_library_there_is_nothing_to_force(monkeypatch):
    monkeypatch.setattr(forced, "native", lambda: Native(None, "not built"))
    assert forced.policies(80) == []


def test_a_policy_that_raises_is_a_failed_result_and_the_next_one_runs(compiled, monkeypatch):
    compiled(_policy(80, 16), _policy(80, 16, tile_n=64))

    def broken(*_):
        raise RuntimeError("too much shared memory")

    monkeypatch.setattr(forced, "_run", broken)
    found = forced.run_forced(CASE, Options(), CUDA)
    assert [result.name for result in found] == ["sm80.8x8-8.128x128k16", "sm80.8x8-8.128x64k16"]
    assert not any(result.passed or result.timings for result in found)
    assert "too much shared memory" in str(found[0].failures)
