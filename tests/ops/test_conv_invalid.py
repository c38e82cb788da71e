"""Invalid convolutions raise what torch raises, say value and limit, and change nothing."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse import config

from ..cases.conv import INVALID
from ..cases.invalid import InvalidCase


def raised(call: Any, device: torch.device) -> BaseException:
    with pytest.raises(Exception) as info:  # noqa: PT011 - the type is what is compared
        call(device)
    return info.value


@pytest.mark.parametrize("case", INVALID, ids=str)
def test_as_torch(case: InvalidCase, device: torch.device) -> None:
    ours, theirs = raised(case.ours, device), raised(case.theirs, torch.device("cpu"))
    assert type(ours) is type(theirs), f"{ours!r} instead of {theirs!r}"
    for word in case.words:
        assert word in str(ours)
    assert config.counters() == {"fallback": {}, "handover": {}}


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape)


# What torch refuses only where there are images: dtypes of x and bias, settings, transposed.
UNNOTICED: dict[str, tuple[torch.dtype, torch.dtype, dict[str, Any], bool]] = {
    "dilation": (torch.float32, torch.float32, {"dilation": (1, 0)}, False),
    "same": (torch.float32, torch.float32, {"dilation": 0, "padding": "same"}, False),
    "transposed_dilation": (torch.float32, torch.float32, {"dilation": 0}, True),
    "output_padding": (torch.float32, torch.float32, {"output_padding": 1}, True),
    "x_double": (torch.float64, torch.float32, {}, False),
    "x_half": (torch.float16, torch.float32, {}, True),
    "x_integer": (torch.int64, torch.float32, {}, False),
    "bias_double": (torch.float32, torch.float64, {}, True),
}


@pytest.mark.parametrize("batch", [2, 0])
@pytest.mark.parametrize("name", UNNOTICED)
def test_what_torch_does_not_notice_without_images(name: str, batch: int) -> None:
    """It is refused nevertheless, as with images."""
    of_x, of_bias, options, transposed = UNNOTICED[name]
    weight = _ones(4, 6, 3, 3) if transposed else _ones(6, 4, 3, 3)
    names = "conv_transpose2d" if transposed else "conv2d"

    def call(namespace: Any, images: int) -> Any:
        x, bias = _ones(images, 4, 5, 6).to(of_x), _ones(6).to(of_bias)
        return getattr(namespace, names)(x, weight, bias, **options)

    ours = raised(lambda device: call(pcf.ops, batch), torch.device("cpu"))
    theirs = raised(lambda device: call(F, 2), torch.device("cpu"))
    assert type(ours) is type(theirs)
    assert names in str(ours)


BAD_NORMS = {
    "one_value": (
        lambda: pcf.ops.conv2d_batch_norm(_ones(1, 4, 3, 3), _ones(6, 4, 3, 3), training=True),
        ValueError,
        "more than 1 value",
    ),
    "unbatched": (
        lambda: pcf.ops.conv2d_batch_norm(_ones(4, 9, 9), _ones(6, 4, 3, 3), training=True),
        ValueError,
        "4D input",
    ),
    "no_statistics": (
        lambda: pcf.ops.conv2d_batch_norm(_ones(2, 4, 9, 9), _ones(6, 4, 3, 3)),
        RuntimeError,
        "evaluation mode",
    ),
    "sizes": (
        lambda: pcf.ops.conv2d_batch_norm(
            _ones(2, 4, 9, 9), _ones(6, 4, 3, 3), training=True, bn_weight=_ones(5)
        ),
        RuntimeError,
        "6 elements",
    ),
    "eps": (
        lambda: pcf.ops.conv2d_batch_norm(
            _ones(2, 4, 9, 9), _ones(6, 4, 3, 3), training=True, eps="small"
        ),
        TypeError,
        "str",
    ),
    "momentum": (
        lambda: pcf.ops.conv2d_batch_norm(
            _ones(2, 4, 9, 9), _ones(6, 4, 3, 3), training=True, momentum=-1.0
        ),
        ValueError,
        "at least 0",
    ),
}


@pytest.mark.parametrize("name", BAD_NORMS)
def test_batch_norms(name: str) -> None:
    call, kind, words = BAD_NORMS[name]
    with pytest.raises(kind, match=words):
        call()


def test_a_refused_batch_changes_no_statistic() -> None:
    layer = pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, 2.0)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    for x in (_ones(1, 4, 3, 3), _ones(2, 3, 9, 9), _ones(4, 9, 9), _ones(2, 4, 2, 9)):
        with pytest.raises((ValueError, RuntimeError)):
            layer(x)
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())


def test_programs_are_checked() -> None:
    x, weight = _ones(2, 4, 9, 9), _ones(6, 4, 3, 3)
    with pytest.raises(ValueError, match="16 steps"):
        pcf.ops.conv2d(x, weight, _ones(6), epilogue=(pcf.relu(),) * 16)
    with pytest.raises(RuntimeError, match="does not broadcast"):
        pcf.ops.conv2d(x, weight, epilogue=(pcf.add(_ones(1, 2, 6, 7, 7)),))
    with pytest.raises(RuntimeError, match="does not broadcast"):
        pcf.ops.conv2d(x, weight, epilogue=(pcf.add(_ones(6)),))
    with pytest.raises(RuntimeError, match="after the tail"):
        pcf.ops.conv2d_batch_norm(x, weight, training=True, after=(pcf.add(_ones(5, 1, 1)),))
    with pytest.raises(ValueError, match="precision"):
        pcf.ops.conv2d(x, weight, precision="fp8")


@pytest.mark.cuda
def test_tensors_of_two_devices(cuda: torch.device) -> None:
    x, weight = _ones(2, 4, 9, 9).to(cuda), _ones(6, 4, 3, 3)
    with pytest.raises(RuntimeError, match="same device"):
        pcf.ops.conv2d(x, weight)
