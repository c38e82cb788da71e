"""A call that is replayed is one like the recorded one in all that decides on it."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import pycutfuse as pcf
from pycutfuse.ops import _launch
from pycutfuse.testing.forcing import exact_promotion
from pycutfuse.testing.memory import guarded

from .simulated import Binding
from .test_norm_memo import CLOSE, Plain, binding, make, same, warm

__all__ = ["binding"]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "state",
    [
        torch.inference_mode,
        torch.no_grad,
        guarded,
        deterministic,
        forward_ad.dual_level,
        lambda: FlopCounterMode(display=False),
        lambda: pcf.precision("torch"),
        exact_promotion,
    ],
    ids=[
        "inference",
        "no_grad",
        "allocator",
        "deterministic",
        "dual",
        "mode",
        "precision",
        "promotion",
    ],
)
def test_the_state_of_a_call_is_seen(
    state: Callable[[], Any], binding: Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = make(precision=None), torch.rand(5, 6)
    again = warm(layer, x, monkeypatch)
    twin = Plain(layer)
    twin.follow()
    with state():
        torch.testing.assert_close(layer(x), twin(x), **CLOSE)
    assert again == [False]
    assert layer(x).requires_grad


def test_own_settings_and_cleared_caches_are_seen(
    binding: Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = make(), torch.rand(5, 6)
    again = warm(layer, x, monkeypatch)
    for value in ("torch", "ieee"):
        layer.precision = value
        layer(x)
    monkeypatch.setattr(_launch, "generation", object())  # as `clear_caches`
    layer(x)
    assert again == [False, True, False]


def test_the_tier_of_the_thread_is_seen(binding: Binding, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make(), torch.rand(5, 6)
    layer.precision = None
    again = warm(layer, x, monkeypatch)
    for tier in ("torch", None, "tf32", "ieee"):
        with pcf.precision(tier):
            layer(x)
    assert again == [False, True, False, False]


@pytest.mark.parametrize(
    ("change", "replayed"),
    [
        (lambda x: x.clone(), True),
        (lambda x: x.clone().requires_grad_(), False),
        (lambda x: x[:4], False),
        (lambda x: x.T.contiguous().T, False),
        (lambda x: x.half().float(), True),
        (lambda x: nn.Parameter(x, requires_grad=False), False),
    ],
    ids=["clone", "requires_grad", "rows", "strides", "values", "class"],
)
def test_the_argument_is_seen(
    change: Callable[[Tensor], Tensor],
    replayed: bool,
    binding: Binding,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, x = make(), torch.rand(5, 6)
    twin = Plain(layer)
    with torch.no_grad():
        again = warm(layer, x, monkeypatch)
        other = change(x)
    twin.follow()
    same(layer, twin, other)
    assert again == [replayed]


def test_a_copy_with_the_same_memo_is_seen(
    binding: Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = make(), torch.rand(5, 6)
    again = warm(layer, x, monkeypatch)
    other = type(layer).__new__(type(layer))  # as replicas of DataParallel are made
    other.__dict__ = layer.__dict__ | {"_modules": dict(layer._modules)}
    other._modules["gemm"] = nn.Linear(6, 4)
    twin = Plain(other)
    twin.follow()
    same(other, twin, x)
    assert again == [False]


def test_what_alternates_is_recorded_ever_more_rarely(binding: Binding) -> None:
    layer, x, made = make(), torch.rand(5, 6), []
    for at in range(70):
        with torch.set_grad_enabled(at % 2 == 0):
            layer(x)
        made.append(layer._memo.replay)
    kinds = {id(one) for one in made if one is not None}
    assert 3 <= len(kinds) <= 8
    assert made[-1] is made[-2]


def test_a_replay_belongs_to_no_leak(binding: Binding) -> None:
    layer, x = make(), torch.rand(5, 6)
    for _ in range(5):
        layer(x)
    assert layer._memo.replay is not None
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None


def test_a_failed_launch_gives_its_memory_back(
    binding: Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = make(), torch.rand(5, 6)
    monkeypatch.setattr(binding, "bind", lambda *_: fails)
    fails = Failing()
    for _ in range(4):
        layer(x)
    assert layer._memo.replay is not None
    fails.now = True
    with pytest.raises(RuntimeError, match="the launch failed"):
        layer(x)


class Failing:
    """A launch that writes nothing, or fails."""

    now = False

    def __call__(self, *given: Any) -> None:
        if self.now:
            raise RuntimeError("the launch failed")


def test_a_replaced_child_is_not_kept(binding: Binding, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make(), torch.rand(5, 6)
    warm(layer, x, monkeypatch)
    kept = weakref.ref(layer.gemm)
    layer.gemm = nn.Linear(6, 4)
    gc.collect()
    assert kept() is None
    twin = Plain(layer)
    twin.follow()
    torch.testing.assert_close(layer(x), twin(x), **CLOSE)


@pytest.mark.parametrize("change", [lambda layer: layer.train(), nn.Module.float, pcf.unfreeze])
def test_what_unfreezes_drops_the_replay(
    change: Callable[[nn.Module], Any], binding: Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = make(), torch.rand(5, 6)
    warm(layer, x, monkeypatch)
    assert layer._memo.replay is not None
    change(layer)
    assert layer._memo.replay is None
    warm(layer, x, monkeypatch)
