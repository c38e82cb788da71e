"""Direct kernels: what crosses the border of them."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import pycutfuse as pcf
from pycutfuse.ops import _conv, _conv_batch_norm_raw, _conv_launch, _gate, _launch
from pycutfuse.ops import _conv_raw as raw
from pycutfuse.testing import forced_conv_policy, generate, guarded

from ..cases.conv import ConvCase, laid_out
from ..cases.direct import OTHERS, WINDOWS
from .simulated_conv import ConvBinding, install

DIRECT = SimpleNamespace(tile_n=0, gemm=SimpleNamespace(source=0), direct=1)
CASES = [WINDOWS[0], WINDOWS[3], WINDOWS[11], WINDOWS[18], *OTHERS[-3:]]


@pytest.fixture(autouse=True)
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConvBinding]:
    """Host tensors take the road of CUDA tensors, to direct kernels."""
    monkeypatch.setattr(_gate, "_ON_CPU", _gate._DTYPES)
    for one in (raw, _conv_batch_norm_raw):
        monkeypatch.setattr(one, "forward", one._forward_cuda)
    with forced_conv_policy(DIRECT):
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
    shapes = [(value.shape[-3], 1, 1), value.shape[-2:], (value.shape[-3], 1, value.shape[-1])]
    operands = [draw(shape, seed).to(dtype) for seed, shape in enumerate(shapes)]
    full = draw(value.shape, 4).to(dtype)
    for residual in (full, laid_out(full, "channels_last")):
        given = (*operands, residual)
        result = launch(case, *tensors, epilogue=[pcf.add(one) for one in given])
        expected = value
        for one in given:
            expected = expected + one.float()
        torch.testing.assert_close(result, expected.to(dtype))
        if layout in ("contiguous", "channels_last"):
            assert result.stride() == case.theirs(*tensors).stride()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_images_are_read_at_any_address(
    dtype: torch.dtype, layout: str, binding: ConvBinding
) -> None:
    case = WINDOWS[0]
    x, weight, bias = case.draw(draw, layout=layout, dtype=dtype)
    memory = x.new_full((x.numel() + 1,), float("nan"))
    moved = torch.as_strided(memory, x.shape, x.stride(), 1).copy_(x)
    assert torch.equal(launch(case, moved, weight, bias), launch(case, x, weight, bias))
    assert binding.planned == 1  # no copy of another place
