"""Which tier a call and its planes have: each is planned apart, planes serve both or one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse import config
from pycutfuse.ops import _frozen, _launch, _linear, _memo
from pycutfuse.ops import _linear_batch_norm_raw as raw

from .simulated import Binding, _matrix, install

CODES = {"ieee": 0, "tf32": 1}


@pytest.fixture(params=[True, False], ids=["guard", "no guard"])
def binding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Binding]:
    monkeypatch.setattr(_memo.Memo, "trusted", request.param)
    monkeypatch.setattr(_linear, "_forward_op", _linear._forward_cuda)
    monkeypatch.setattr(raw, "forward", raw._forward_cuda)
    yield install(monkeypatch)
    _launch.clear_caches()


def planes(layer: torch.nn.Module, count: int) -> None:
    n, k = layer.frozen_weight().shape
    shape = (count, n, 2 * (-(-k // 8) * 8))
    layer.planes, layer.words = torch.zeros(shape, dtype=torch.uint8), torch.zeros(n).int()
    layer._frozen_of = layer.frozen_weight(), None


def make(kind: str, precision: config.Precision | None = None) -> torch.nn.Module:
    if kind == "linear":
        return pcf.nn.Linear(8, 4, precision=precision).eval()
    return pcf.nn.LinearScaleBatchNorm1d(8, 4, (4,), precision=precision).eval()


@pytest.mark.parametrize("kind", ["linear", "norm"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_module_changes_tiers(kind: str, grad: bool, binding: Binding) -> None:
    layer, x = make(kind), torch.rand(5, 8)
    with torch.set_grad_enabled(grad):
        for tier in ("ieee", "tf32", "ieee", "torch", "tf32"):
            with pcf.precision(tier):
                for _ in range(3):
                    before = binding.launched
                    torch.testing.assert_close(layer(x), layer.to_torch()(x))
                    assert binding.launched == before + (tier != "torch")
                    if tier != "torch":
                        assert binding.last["problem"].precision == CODES[tier]
    assert binding.planned == 2
    assert sum(config.counters()["handover"].values()) == 3


def test_the_default_follows_torchs_flag(binding: Binding) -> None:
    layer, x = make("linear"), torch.rand(5, 8)
    outer = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (False, True, False):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            for _ in range(3):
                layer(x)
                assert binding.last["problem"].precision == int(allowed)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = outer


@pytest.mark.parametrize("kind", ["linear", "norm"])
@pytest.mark.parametrize(
    ("made", "tier", "used"),
    [(2, "ieee", True), (2, "tf32", True), (1, "tf32", True), (1, "ieee", False)],
)
def test_planes_that_serve_a_tier(kind, made: int, tier, used: bool, binding: Binding) -> None:
    layer, x = make(kind, tier), torch.rand(5, 8)
    planes(layer, made)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(layer(x), layer.to_torch()(x))
            addresses = (layer.planes.data_ptr(), layer.words.data_ptr())
            assert binding.last["planes"] == (addresses if used else (0, 0))
    notes = pcf.explain(layer, x).notes
    assert any("frozen at the tf32 tier" in note for note in notes) != used


@pytest.mark.parametrize("tier", CODES)
def test_planes_are_made_for_a_tier(tier: str, binding: Binding, monkeypatch) -> None:
    asked, read = [], []

    def split(*given: Any) -> None:
        asked.append(given[5])
        read.append(_matrix(given[0], 4, 9, *given[1:3]).clone())

    binding.split = split
    event = type("Stream", (), {"record_event": lambda self: None})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: event())
    monkeypatch.setattr(_frozen, "raw_stream", lambda index: 77)
    weight = torch.rand(4, 9)
    negated = torch.complex(weight, -weight).conj().imag
    assert negated.is_neg()
    count = 2 - CODES[tier]
    for given in (weight, negated):
        made, words = _frozen.make_planes(given, tier)
        assert (made.shape, words.numel()) == ((count, 4, 2 * 16), 4)
        _frozen.forget(made)
    assert asked == [count, count]
    assert torch.equal(read[0], weight)
    assert torch.equal(read[1], weight)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("module", "context", "flag", "count"),
    [
        (None, None, False, 2),
        (None, None, True, 1),
        (None, "tf32", False, 1),
        ("ieee", "tf32", True, 2),
        ("tf32", None, False, 1),
        ("torch", None, False, 2),
    ],
)
def test_freeze_takes_the_tier_in_force(module, context, flag: bool, count: int, cuda) -> None:
    layer = pcf.nn.Linear(256, 64, device=cuda, precision=module).eval()
    outer = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = flag
    try:
        with pcf.precision(context):
            pcf.freeze(layer)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = outer
    assert layer.planes.numel() == 2 * count * 64 * 256


@pytest.mark.cuda
@pytest.mark.parametrize("frozen", CODES)
@pytest.mark.parametrize("tier", CODES)
def test_frozen_planes_change_nothing(frozen, tier, cuda: torch.device, fused: None) -> None:
    layer, x = pcf.nn.Linear(1024, 1030, device=cuda).eval(), torch.randn(200, 1024, device=cuda)
    with torch.no_grad(), pcf.precision(tier):
        plain: Tensor = layer(x)
        with pcf.precision(frozen):
            pcf.freeze(layer)
        assert layer.frozen
        assert torch.equal(layer(x), plain)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_freezing_16_bit_weights_keeps_nothing(dtype, cuda: torch.device, fused: None) -> None:
    layer = pcf.nn.Linear(300, 130, device=cuda, dtype=dtype).eval()
    x = torch.randn(70, 300, device=cuda, dtype=dtype)
    plain = layer(x)
    pcf.freeze(layer)
    assert not layer.frozen
    assert torch.equal(layer(x), plain)
    torch.testing.assert_close(plain, F.linear(x, layer.weight, layer.bias), rtol=0.02, atol=0.02)
