"""Invalid convolutions raise what torch raises, say value and limit, and change nothing."""

from typing import Any

import pytest
import torch
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
