"""Variants take turns in changing order, on rotating inputs, each under its own flags."""

from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from pycutfuse.bench import timing
from pycutfuse.bench.timing import Settings, Variant, interleave, rotating, sets_needed


def test_no_variant_comes_after_itself():
    order = []

    def sample(call, slice_s):
        call()
        return [slice_s], "fake"

    variants = [Variant(name, lambda name=name: order.append(name)) for name in "abc"]
    timings = interleave(variants, Settings(slice_s=0.5, rounds=4), sample)
    assert "".join(order) == "abcacbcabcba"
    assert not any(name == after for name, after in pairwise(order))
    assert timings["b"].seconds.count == 4
    assert timings["b"].seconds.median == 0.5


def test_summary_is_of_the_variants_own_samples_from_all_rounds():
    script = {"a": iter([[1.0, 2.0], [3.0]]), "b": iter([[10.0], [20.0]])}
    variants = [Variant(name, lambda name=name: name) for name in script]
    timings = interleave(
        variants, Settings(rounds=2), lambda call, slice_s: (next(script[call()]), "fake")
    )
    assert timings["a"].seconds.median == 2.0
    assert timings["b"].seconds.median == 15.0


def test_context_holds_only_while_its_variant_is_sampled():
    inside = []
    state = {"flag": False}

    @contextmanager
    def flag():
        state["flag"] = True
        yield
        state["flag"] = False

    variants = [Variant("a", lambda: inside.append(("a", state["flag"])), flag)]
    variants.append(Variant("b", lambda: inside.append(("b", state["flag"]))))

    def sample(call, slice_s):
        assert not torch.is_grad_enabled()
        call()
        return [1.0], "fake"

    interleave(variants, Settings(rounds=2), sample)
    assert inside == [("a", True), ("b", False), ("a", True), ("b", False)]


def test_inputs_rotate():
    call = rotating(lambda x: x, [(1,), (2,), (3,)])
    assert [call() for _ in range(4)] == [1, 2, 3, 1]


@pytest.mark.parametrize("size", [1, 4 * 64 * 64, 33_554_432, 10**9])
def test_rotated_sets_exceed_the_cache(size):
    count = sets_needed(size)
    assert count >= 2
    assert count * size >= timing.ROTATED_BYTES
    assert count == 2 or (count - 1) * size < timing.ROTATED_BYTES


class FakeCuda:
    """A GPU whose clock moves by `kernel_s` at each call; the host takes no time."""

    def __init__(self, kernel_s):
        self.now = 0.0
        self.kernel_s = kernel_s
        self.calls = 0
        self.slept = 0
        fake = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = fake.now

            def elapsed_time(self, end):
                return (end.at - self.at) * 1e3

        self.Event = Event

    def call(self):
        self.calls += 1
        self.now += self.kernel_s

    def synchronize(self):
        pass

    def _sleep(self, cycles):
        assert cycles > 0
        self.slept += 1
        self.now += 1e-3


@pytest.fixture
def fake_cuda(monkeypatch):
    def make(kernel_s):
        fake = FakeCuda(kernel_s)
        monkeypatch.setattr(timing, "_cuda", fake)
        return fake

    return make


@pytest.mark.parametrize("kernel_s", [200e-6, 2.5e-3, 11e-3, 0.3])
def test_long_kernels_run_back_to_back_for_the_slice(fake_cuda, kernel_s):
    fake = fake_cuda(kernel_s)
    samples, regime = timing.sample_cuda(fake.call, 0.2)
    assert regime == "sustained"
    assert fake.slept == 0
    assert samples == pytest.approx([kernel_s] * len(samples))
    assert fake.now >= 0.2
    assert len(samples) >= 3


def test_the_way_down_from_the_boost_clock_is_not_sampled(fake_cuda):
    fake = fake_cuda(1e-3)

    def call():
        fake.kernel_s = 1e-3 if fake.calls < 30 else 2e-3
        fake.call()

    samples, _ = timing.sample_cuda(call, 0.2)
    assert samples == pytest.approx([2e-3] * len(samples))


def test_short_kernels_run_behind_a_backlog_that_is_not_counted(fake_cuda):
    fake = fake_cuda(10e-6)
    samples, regime = timing.sample_cuda(fake.call, 0.0)
    assert regime == "backlog"
    assert fake.slept == len(samples) >= 5
    assert samples == pytest.approx([10e-6] * len(samples))
