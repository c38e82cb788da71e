"""1x1 convolutions of NCHW images as they are: which tensors cross the border, and how."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import pycutfuse as pcf
from pycutfuse.ops import _conv, _conv_launch, _gate, _launch
from pycutfuse.ops import _conv_raw as raw
from pycutfuse.testing import forced_conv_policy, generate, guarded

from ..cases.conv import ConvCase, laid_out
from .simulated_conv import ConvBinding, install

PLANES = SimpleNamespace(tile_n=0, gemm=SimpleNamespace(source=2), direct=0)
CASES = [
    ConvCase(8, 6, (1, 1), (6, 8), 3),
    ConvCase(16, 12, (1, 1), (2, 2), None, bias=False),
    ConvCase(8, 5, (1, 1), (4, 7), 1),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(autouse=True)
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConvBinding]:
    """Host tensors take the road of CUDA tensors, and are read in planes."""
    monkeypatch.setattr(_gate, "_ON_CPU", _gate._DTYPES)
    monkeypatch.setattr(raw, "forward", raw._forward_cuda)
    with forced_conv_policy(PLANES):
        yield install(monkeypatch)
    _launch.clear_caches()


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return generate("randn", shape, seed=seed)


def launch(case: ConvCase, *tensors: Tensor | None, **options: object) -> Tensor:
    call = _conv.prepare_conv2d(*tensors, **case.options, precision="tf32", **options)
    assert isinstance(_conv_launch.lookup(call, "tf32"), _conv_launch.ConvRecipe)
    with guarded():
        return raw._forward_cuda(*raw.flat(call))


@every_case
def test_operands_lie_as_the_result(case: ConvCase, binding: ConvBinding) -> None:
    tensors = case.draw(draw)
    value = case.theirs(*tensors)
    vector, full = draw((value.shape[-3], 1, 1), 7), draw(value.shape, 4)
    for residual in (full, laid_out(full, "channels_last")):
        result = launch(case, *tensors, epilogue=(pcf.mul(vector), pcf.add(residual)))
        torch.testing.assert_close(result, value * vector + full)
        assert result.stride() == value.stride()
    assert binding.last["problem"].pixel_stride == 1


@pytest.mark.parametrize("shifts", [(0, 0), (1, 0), (0, 3), (4, 8), (2, 1)])
@every_case
def test_at_any_address(case: ConvCase, shifts: tuple[int, int]) -> None:
    x, weight, bias = case.draw(draw)

    def moved(tensor: Tensor, shift: int) -> Tensor:
        arena = tensor.new_full((tensor.numel() + shift,), float("nan"))
        return arena[shift:].view(tensor.shape).copy_(tensor)

    tensors = moved(x, shifts[0]), moved(weight, shifts[1]), bias
    torch.testing.assert_close(launch(case, *tensors), case.theirs(*tensors))


@pytest.mark.parametrize(
    ("layout", "stride"),
    [("contiguous", 1), ("gapped", 0), ("permuted", 0), ("weight_channels_last", 1)],
)
def test_only_images_without_gaps_are(layout: str, stride: int) -> None:
    for dtype in (torch.float32, torch.float16):
        tensors = CASES[0].draw(draw, layout=layout, dtype=dtype)
        call = _conv.prepare_conv2d(*tensors)
        made = _conv_launch._problem(call, (3, 6, 6, 8), "tf32", channels_last=False)
        assert made.pixel_stride == (stride if dtype is torch.float32 else 0)
    apart = draw((6, 16, 1, 1), 2)[:, ::2]
    call = _conv.prepare_conv2d(CASES[0].draw(draw)[0], apart)
    assert _conv_launch._problem(call, (3, 6, 6, 8), "tf32", False).pixel_stride == 0
