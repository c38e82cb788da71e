"""A module that remembers its last launch notices everything that would change it."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import pycutfuse as pcf
from pycutfuse.ops import _conv_batch_norm_raw, _conv_launch, _conv_raw, _gate, _launch
from pycutfuse.ops._memo import Memo
from pycutfuse.testing import generate, slow_problems_taken

from .simulated_conv import ConvBinding, install


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConvBinding]:
    monkeypatch.setattr(_gate, "_ON_CPU", _gate._DTYPES)
    for raw in (_conv_raw, _conv_batch_norm_raw):
        monkeypatch.setattr(raw, "forward", raw._forward_cuda)
    yield install(monkeypatch)
    _launch.clear_caches()


def draw(*shape: int, seed: int = 1) -> Tensor:
    return generate("randn", shape, seed=seed)


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    steps = (pcf.mul(nn.Parameter(torch.rand(6, 1, 1))), pcf.relu())
    return {
        "conv": pcf.nn.Conv2d(4, 6, 3, epilogue=steps, precision="ieee"),
        "transposed": pcf.nn.ConvTranspose2d(4, 6, 3, bias=False, precision="ieee"),
        "norm": pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, 2.0, epilogue=steps, precision="ieee"),
    }


@pytest.mark.parametrize("name", ["conv", "transposed", "norm"])
@pytest.mark.parametrize("grad", [False, True])
def test_the_third_call_looks_nothing_up(name, grad, monkeypatch, binding: ConvBinding) -> None:
    assert Memo.trusted
    layer = layers()[name]
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            layer(draw(2, 4, 9, 8))
        monkeypatch.setattr(_conv_launch, "cached", None)
        torch.testing.assert_close(layer(draw(2, 4, 9, 8)), layer.to_torch()(draw(2, 4, 9, 8)))
        assert binding.launched == 4
        with pytest.raises(TypeError):
            layer(draw(2, 4, 9, 9))


CHANGES = {
    "batch": lambda layer, x: draw(3, 4, 9, 8),
    "size": lambda layer, x: draw(2, 4, 8, 9),
    "layout": lambda layer, x: x.to(memory_format=torch.channels_last),
    "offset": lambda layer, x: draw(2 * 4 * 9 * 8 + 1)[1:].view(2, 4, 9, 8),
    "gaps": lambda layer, x: draw(2, 4, 9, 16)[..., ::2],
    "unbatched": lambda layer, x: x[0],
    "stride": lambda layer, x: setattr(getattr(layer, "conv", layer), "stride", (2, 2)) or x,
    "padding": lambda layer, x: setattr(getattr(layer, "conv", layer), "padding", (1, 1)) or x,
    "weight": lambda layer, x: getattr(layer, "conv", layer).weight.data.transpose_(2, 3) is x or x,
    "bias": lambda layer, x: setattr(getattr(layer, "conv", layer), "bias", None) or x,
    "eval": lambda layer, x: layer.eval() and x,
    "double": lambda layer, x: layer.double() and x.double(),
    "factor": lambda layer, x: setattr(layer, "scaling_factor", 3.0) or x,
}


KINDS = [(name, change) for name in layers() for change in CHANGES]
KINDS.remove(("norm", "unbatched"))  # which it refuses


@pytest.mark.parametrize(("name", "change"), KINDS)
def test_changes_are_noticed(name: str, change: str, binding: ConvBinding) -> None:
    layer, x = layers()[name], draw(2, 4, 9, 8)
    with torch.no_grad():
        for _ in range(3):
            layer(x)
        x = CHANGES[change](layer, x)
        for _ in range(3):
            twin = layer.to_torch()
            state = {key: value.clone() for key, value in layer.state_dict().items()}
            result = layer(x)
            layer.load_state_dict(state)
            expected = twin(x)
            torch.testing.assert_close(result, expected)
            assert result.dtype is expected.dtype


def test_a_tier_and_cleared_caches_are_noticed(binding: ConvBinding) -> None:
    layer, x = layers()["conv"], draw(2, 4, 9, 8)
    with torch.no_grad():
        for _ in range(3):
            layer(x)
        layer.precision = "tf32"
        layer(x)
        assert binding.last["problem"].precision == 1
        layer.precision = "ieee"
        layer(x)
        assert binding.last["problem"].precision == 0
        planned = binding.planned
        with slow_problems_taken():
            layer(x)
        assert binding.planned == planned + 1


def test_a_size_one_stride_is_noticed(binding: ConvBinding) -> None:
    layer = pcf.nn.Conv2d(1, 6, 3, precision="ieee")
    layer.weight.data = layer.weight.data.as_strided((6, 1, 3, 3), (9, 9, 3, 1))
    x = draw(2, 1, 9, 8)
    last = x.as_strided(x.shape, (72, 1, 8, 1))
    with torch.no_grad():
        for _ in range(3):
            assert layer(x).stride() == layer.to_torch()(x).stride()
        for _ in range(3):
            assert layer(last).stride() == layer.to_torch()(last).stride()
