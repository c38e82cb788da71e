"""Random sizes are seeded, verified before they are timed, and losers are timed once more."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pycutfuse.bench import replay, sizes, timing
from pycutfuse.bench.accuracy import Check, Errors
from pycutfuse.bench.case import SizesCase
from pycutfuse.bench.cases import at_shape
from pycutfuse.bench.results import COMPILE_TUNED, EAGER, OURS, SizeResult, SizesResult
from pycutfuse.bench.runner import Options, make_reference
from pycutfuse.bench.sizes import random_sizes, run_sizes
from pycutfuse.bench.statistics import Summary
from pycutfuse.bench.tiers import TIERS
from pycutfuse.bench.timing import Settings, Timing

CPU = torch.device("cpu")
CASE = SizesCase("sizes", count=100, largest=16384, compiled=12)
GOOD = Check("rand: output", Errors(1e-7, 1e-7), Errors(2e-7, 2e-7), 2.0**-22)


def _timing(seconds):
    return Timing(Summary(seconds, seconds, seconds, 5), "fake")


def _entry(ratio, floor_s=1e-4, **changes):
    times = {EAGER: ratio * 1e-3, OURS: 1e-3}
    return replace(SizeResult("8x8x64", [GOOD], "fused", "", floor_s, times), **changes)


def test_sizes_are_seeded_and_spread_over_all_magnitudes():
    found = random_sizes(CASE)
    assert found == random_sizes(CASE)
    assert found != random_sizes(replace(CASE, seed=1))
    assert found[:5] == random_sizes(replace(CASE, count=5))
    for numbers in zip(*found, strict=True):
        assert 1 <= min(numbers) < 4
        assert 8192 < max(numbers) <= 16384
        assert sum(number <= 128 for number in numbers) == pytest.approx(50, abs=15)


@pytest.mark.parametrize("tier", TIERS)
def test_sizes_are_verified_at_every_tier_on_the_cpu(tier):
    case = replace(CASE, count=4, largest=64)
    found = run_sizes(case, Options(tier=tier), CPU)
    assert found.passed
    assert [e.shape for e in found.entries] == ["x".join(map(str, s)) for s in random_sizes(case)]
    assert all(e.checks and not e.times for e in found.entries)
    assert found.mean is None


def test_a_size_that_is_wrong_or_raises_fails_and_has_no_speed(monkeypatch):
    def spoiled(m, n, k):
        case = at_shape(m, n, k)

        def fuse(reference):
            if m % 2:
                raise RuntimeError("no kernel image")
            return nn.Sequential(case.fused(reference), nn.Softplus())

        return replace(case, fused=fuse)

    monkeypatch.setattr(sizes, "at_shape", spoiled)
    found = run_sizes(replace(CASE, count=6, largest=64), Options(), CPU)
    assert not found.passed
    assert not any(entry.passed for entry in found.entries)
    assert {bool(entry.failure) for entry in found.entries} == {True, False}
    assert all(entry.failure in ("", "RuntimeError: no kernel image") for entry in found.entries)


def _timed(monkeypatch, *rounds, compiled=None):
    """`_timed` of one size where each call of the sampler gives the next of `rounds`."""
    script, asked = iter(rounds), []

    def interleave(functions, sets, settings):
        asked.append((list(functions), settings))
        for function in functions.values():
            assert function().shape == (4, 5)
        return {name: _timing(seconds) for name, seconds in next(script).items()}

    monkeypatch.setattr(replay, "interleave", interleave)
    case = at_shape(4, 5, 6)
    reference = make_reference(case, TIERS["ieee"], CPU)
    result = SizeResult("4x5x6", [GOOD])
    return sizes._timed(result, reference, torch.rand(4, 6), case.fused, compiled), asked


def test_a_loser_is_timed_once_more_and_longer(monkeypatch):
    slow, fast = {EAGER: 0.9, OURS: 1.0}, {EAGER: 0.97, OURS: 1.0}
    result, asked = _timed(monkeypatch, slow, fast)
    assert result.first_ratio == pytest.approx(0.9)
    assert result.ratio() == pytest.approx(0.97)
    assert [settings for _, settings in asked] == [sizes.SLICES, sizes.AGAIN]
    result, asked = _timed(monkeypatch, slow, slow)
    assert result.ratio() == pytest.approx(0.9)
    assert len(asked) == 2


def test_a_winner_is_timed_once(monkeypatch):
    result, asked = _timed(monkeypatch, {EAGER: 0.95, OURS: 1.0})
    assert (result.first_ratio, len(asked)) == (None, 1)


def test_the_compiled_chain_is_a_third_column(monkeypatch):
    def uncompiled(function, **options):
        assert options == {"mode": sizes.TUNED, "dynamic": False}
        return function

    monkeypatch.setattr(torch, "compile", uncompiled)
    times = {EAGER: 2.0, OURS: 1.0, COMPILE_TUNED: 1.5}
    result, asked = _timed(monkeypatch, times, compiled=sizes.TUNED)
    assert asked[0][0] == [EAGER, OURS, COMPILE_TUNED]
    assert result.ratio(COMPILE_TUNED) == pytest.approx(1.5)
    said = sizes._line(replace(result, path="fused"))
    assert said == "4x5x6: fused, 2.00x eager, 1.50x compile max-autotune"


def test_all_three_compute_the_same():
    case = at_shape(4, 5, 6)
    model = make_reference(case, TIERS["ieee"], CPU)
    x = torch.rand(4, 6)
    with torch.no_grad():
        expected = F.gelu(F.linear(x, model.linear.weight, model.linear.bias))
        torch.testing.assert_close(model(x), expected)
        torch.testing.assert_close(case.fused(model)(x), expected)


def test_the_mean_is_of_sizes_whose_floor_is_long_enough():
    entries = [_entry(4.0), _entry(1.0), _entry(9.0, floor_s=1e-6), _entry(0.5, floor_s=1e-6)]
    found = SizesResult("sizes", "ieee", [*entries, _entry(1.0, times={})])
    assert found.mean == pytest.approx(2.0)
    assert len(found.comparable) == 2
    assert found.losers == [entries[3]]
    assert min(found.ratios()) == pytest.approx(0.5)


def test_what_is_taken_and_the_mean_of_all_are_counted():
    left = _entry(1.0, path="hand-over", reason="faster", floor_s=1e-6)
    found = SizesResult("conv_sizes", "tf32", [_entry(4.0), left])
    assert (found.taken, found.mean_of_all) == (1, pytest.approx(2.0))
    assert (found.share_taken, found.mean_of_taken) == (0.5, pytest.approx(4.0))
    none = SizesResult("conv_sizes", "tf32", [left])
    assert (none.share_taken, none.mean_of_taken) == (0.0, None)


def test_what_pytorch_ran_is_counted_by_reason():
    left = _entry(1.0, path="hand-over", reason="faster")
    found = SizesResult("sizes", "bf16", [_entry(1.0), left, left])
    assert found.reasons() == {"hand-over: faster": 2}


def test_graphs_hold_whole_rounds_of_the_input_sets():
    for seconds in (1e-7, 1e-5, 3e-4, 1e-2, 1.0):
        for sets in (1, 3, 8):
            calls = replay.calls_per_graph(seconds, sets)
            assert calls % sets == 0
            assert calls < replay.MAX_CALLS + sets
            assert calls == sets or calls * seconds < replay.GRAPH_S + sets * seconds


def _fake_gpu(monkeypatch, capture):
    monkeypatch.setattr(timing, "events", lambda call, chunk, chunks: [1e-4] * chunks)
    monkeypatch.setattr(timing, "backlog", lambda seconds: None)
    monkeypatch.setattr(timing, "warm_up", lambda variant, calls=3: variant.call())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(replay, "capture", capture)


def test_replayed_time_is_per_call_and_not_per_graph(monkeypatch):
    _fake_gpu(monkeypatch, lambda call, calls: lambda: None)
    found = replay.interleave({"a": lambda: None}, 1, Settings(slice_s=1e-3, rounds=2))
    assert replay.calls_per_graph(1e-4, 1) == 4
    assert found["a"].seconds.median == pytest.approx(1e-4 / 4)
    assert found["a"].regime == replay.REPLAY


def test_where_one_cannot_be_captured_all_are_timed_with_events(monkeypatch):
    def capture(call, calls):
        if call is bad:
            raise RuntimeError("operation not permitted when stream is capturing")
        return call

    def bad():
        pass

    _fake_gpu(monkeypatch, capture)
    monkeypatch.setattr(timing, "sample_cuda", lambda call, slice_s: ([2.0], "events"))
    found = replay.interleave({"good": lambda: None, "bad": bad}, 1, Settings(rounds=1))
    assert {t.regime for t in found.values()} == {"events"}
    assert math.isclose(found["good"].seconds.median, 2.0)
