"""What crosses the border to the library is right for the fuzzer's convolutions, too."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pycutfuse.geometry import Geometry, output_shape
from pycutfuse.ops import (
    _conv_batch_norm_raw,
    _conv_batch_norm_vjp,
    _conv_raw,
    _gate,
    _launch,
)
from pycutfuse.testing.repro import FAILURES, ConvConfig, check, draw_conv
from pycutfuse.testing.repro.taps import Taps

from .simulated_conv import ConvBinding, install


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConvBinding]:
    """Calls on the CPU take the way of those on a GPU, whatever their size and dtype."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small problems: threads would only wait for each other
    made = install(monkeypatch)
    monkeypatch.setattr(made, "conv_why_not", lambda problem, device: None)
    monkeypatch.setattr(made, "conv_why_slower", lambda problem, device: None)
    monkeypatch.setattr(_gate, "_ON_CPU", _gate._DTYPES)
    for module in (_conv_raw, _conv_batch_norm_raw):
        monkeypatch.setattr(module, "forward", module._forward_cuda)
    # Backward sees the values of forward.
    monkeypatch.setattr(_conv_raw, "convolve", convolve)
    monkeypatch.setattr(
        _conv_batch_norm_vjp, "convolve_again", lambda call: convolve(*call[:3], call.geometry, "")
    )
    yield made
    _launch.clear_caches()
    torch.set_num_threads(threads)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry, tier: str) -> Tensor:
    taps = Taps(
        tuple(weight.shape[2:]), g.stride, g.padding[:2], g.dilation, g.groups, g.transposed
    )
    size = tuple(output_shape(x, weight, None, g)[-2:])
    value = taps.forward(x.double(), weight.double(), size)
    value = value if bias is None else value + bias[:, None, None]
    return value.to(x.dtype)


def definite(config: ConvConfig) -> bool:
    """Whether torch's gelu is asked for no infinity: on the CPU it depends on the layout."""
    names = {step.name for step in (*config.program, *config.after)}
    tensors = [config.x, config.weight, *([config.bias] if config.bias else [])]
    return "gelu" not in names or not any(one.specials for one in tensors)


def test_drawn_calls_are_right(binding: ConvBinding) -> None:
    drawn = [c for c in (draw_conv(seed, 2**16) for seed in range(400)) if definite(c)]
    outcomes = [check(config, "cpu") for config in drawn]
    assert not [outcome for outcome in outcomes if outcome.verdict in FAILURES]
    assert binding.launched > len(drawn) / 2
