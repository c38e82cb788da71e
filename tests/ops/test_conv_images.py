"""Implicit GEMMs: what crosses the border of them."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import pycutfuse as pcf
from pycutfuse import config
from pycutfuse.ops import _conv, _conv_batch_norm_raw, _conv_launch, _gate, _launch
from pycutfuse.ops import _conv_raw as raw
from pycutfuse.testing import forced_conv_policy, generate, guarded

from ..cases.conv import ConvCase, laid_out
from .simulated_conv import ConvBinding, install

IMPLICIT = SimpleNamespace(tile_n=0, gemm=SimpleNamespace(source=1), direct=0)
CASES = [
    ConvCase(8, 6, (3, 2), (9, 8), 3, stride=2, padding=1),
    ConvCase(16, 6, (1, 1), (7, 5), 2),
    ConvCase(8, 12, (3, 3), (7, 5), None, dilation=2, padding=2),
    ConvCase(8, 6, (3, 3), (7, 5), 2, transposed=True, padding=1),
    ConvCase(24, 6, (3, 3), (3, 3), 4),  # results of one pixel
    ConvCase(12, 6, (3, 2), (9, 8), 3),
]


@pytest.fixture(autouse=True)
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConvBinding]:
    """Host tensors take the road of CUDA tensors, to implicit GEMMs."""
    monkeypatch.setattr(_gate, "_ON_CPU", _gate._DTYPES)
    for one in (raw, _conv_batch_norm_raw):
        monkeypatch.setattr(one, "forward", one._forward_cuda)
    with forced_conv_policy(IMPLICIT):
        yield install(monkeypatch)
    _launch.clear_caches()


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return generate("randn", shape, seed=seed)


def launch(case: ConvCase, *tensors: Tensor | None, **options: object) -> Tensor:
    prepare = _conv.prepare_conv_transpose2d if case.transposed else _conv.prepare_conv2d
    call = prepare(*tensors, **case.options, **{"precision": "ieee"} | options)
    assert isinstance(_conv_launch.lookup(call, "ieee"), _conv_launch.ConvRecipe)
    with guarded():
        return raw._forward_cuda(*raw.flat(call))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gapped", "permuted"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts_and_operands(case: ConvCase, layout: str, dtype: torch.dtype) -> None:
    tensors = case.draw(draw, layout=layout, dtype=dtype)
    value = case.theirs(*(None if one is None else one.float() for one in tensors))
    vector = draw((value.shape[-3], 1, 1), 7).to(dtype)
    full = draw(value.shape, 4).to(dtype)
    for residual in (full, laid_out(full, "channels_last")):
        result = launch(case, *tensors, epilogue=(pcf.mul(vector), pcf.add(residual)))
        expected = value * vector.float() + full.float()
        torch.testing.assert_close(result, expected.to(dtype))
        if layout in ("contiguous", "channels_last"):
            assert result.stride() == case.theirs(*tensors).stride()


@pytest.mark.parametrize("shift", [0, 1, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_images_at_any_address(dtype: torch.dtype, shift: int) -> None:
    case = CASES[0]
    x, weight, bias = case.draw(draw, layout="channels_last", dtype=dtype)
    arena = x.new_full((x.numel() * 2 + shift,), float("nan"))
    wider = arena[shift:].view(*x.movedim(1, -1).shape[:-1], 16).movedim(-1, 1)
    expected = case.theirs(x.float(), weight.float(), bias.float()).to(dtype)
    for first in (0, 8, 3):
        part = wider[:, first : first + 8].copy_(x)
        torch.testing.assert_close(launch(case, part, weight, bias), expected)


def test_what_only_a_forced_policy_takes_is_launched(binding: ConvBinding) -> None:
    """Its plan says what it does not take, in place of what is selected."""
    case = ConvCase(channels=130)
    tensors = case.draw(draw)
    # Sums of 1170 products, in an order that depends on the host.
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(launch(case, *tensors), case.theirs(*tensors), **close)
    assert binding.launched == 1
    prepared = _conv.prepare_conv2d(*tensors, **case.options, precision="ieee")
    with forced_conv_policy(None):
        refused = _conv_launch.lookup(prepared, "ieee")
    assert refused == _launch.Refusal("more than 128 channels per group", False)


def test_what_a_forced_policy_does_not_take_raises(
    binding: ConvBinding, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError("an implicit GEMM has images of one group of channels")

    monkeypatch.setattr(binding, "make_conv_plan", refuse)
    case = ConvCase(groups=2)
    with pytest.raises(NotImplementedError, match="one group"):
        raw._forward_cuda(*raw.flat(_conv.prepare_conv2d(*case.draw(draw), **case.options)))
    assert config.counters() == {"fallback": {}, "handover": {}}
