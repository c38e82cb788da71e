"""Invalid calls beside torch's for the same: the exception types must agree."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import pycutfuse as pcf


@dataclass(frozen=True)
class InvalidCase:
    """A call of ours, torch's, and words that our message must have."""

    name: str
    ours: Callable[[torch.device], Any]
    theirs: Callable[[torch.device], Any]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


def _t(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, device=device, dtype=dtype)


def _pair(name: str, make: Callable[[torch.device], tuple[Any, ...]], *words: str) -> InvalidCase:
    return InvalidCase(
        name, lambda d: pcf.ops.linear(*make(d)), lambda d: F.linear(*make(d)), words
    )


LINEAR = [
    _pair("features", lambda d: (_t(2, 3, device=d), _t(4, 5, device=d)), "3", "5", "equal"),
    _pair("scalar", lambda d: (_t(device=d), _t(4, 3, device=d)), "0 dimensions", "at least 1"),
    _pair("weight_3d", lambda d: (_t(2, 3, device=d), _t(2, 4, 3, device=d)), "3 dimensions"),
    _pair("bias_size", lambda d: (_t(2, 3, device=d), _t(4, 3, device=d), _t(5, device=d)), "5"),
    _pair(
        "dtype",
        lambda d: (_t(2, 3, device=d), _t(4, 3, device=d, dtype=torch.float64)),
        "float32",
        "float64",
        ".to(",
    ),
    _pair(
        "bias_dtype",
        lambda d: (_t(2, 3, device=d), _t(4, 3, device=d), _t(4, device=d).double()),
        "bias",
        "float64",
    ),
    _pair("list", lambda d: ([1.0], _t(4, 3, device=d)), "list", "Tensor"),
    _pair("none", lambda d: (None, _t(4, 3, device=d)), "NoneType", "Tensor"),
    _pair("weight_none", lambda d: (_t(2, 3, device=d), None), "NoneType", "Tensor"),
    _pair("bias_number", lambda d: (_t(2, 3, device=d), _t(4, 3, device=d), 1.0), "float"),
]


def _bn(features: int = 4, **changes: Any) -> Callable[[torch.device], Any]:
    def call(d: torch.device) -> Any:
        given = {name: value(d) if callable(value) else value for name, value in changes.items()}
        x = given.pop("x", None)
        x = _t(3, 5, device=d) if x is None else x
        return pcf.ops.linear_batch_norm(x, _t(features, 5, device=d), **given)

    return call


def _torch_bn(shape: tuple[int, ...], **options: Any) -> Callable[[torch.device], Any]:
    def call(d: torch.device) -> Any:
        given = {name: value(d) if callable(value) else value for name, value in options.items()}
        mean, var = given.pop("running_mean", None), given.pop("running_var", None)
        return F.batch_norm(_t(*shape, device=d), mean, var, **given)

    return call


def _ones(size: int) -> Callable[[torch.device], torch.Tensor]:
    return lambda d: _t(size, device=d)


BATCH_NORM = [
    InvalidCase(
        "one_sample",
        _bn(x=lambda d: _t(1, 5, device=d), training=True),
        _torch_bn((1, 4), training=True),
        ("more than 1 value", "[1, 4]", "eval"),
    ),
    InvalidCase(
        "no_statistics", _bn(training=False), _torch_bn((3, 4), training=False), ("running_mean",)
    ),
    InvalidCase(
        "running_size",
        _bn(running_mean=_ones(5), running_var=_ones(5)),
        _torch_bn((3, 4), running_mean=_ones(5), running_var=_ones(5)),
        ("running_mean", "4 elements", "5"),
    ),
    InvalidCase(
        "weight_size",
        _bn(bn_weight=_ones(3), training=True),
        _torch_bn((3, 4), weight=_ones(3), training=True),
        ("bn_weight", "4 elements", "3"),
    ),
    InvalidCase(
        "input_1d",
        _bn(x=_ones(5), training=True),
        lambda d: torch.nn.BatchNorm1d(4, device=d)(_t(4, device=d)),
        ("expected 2D", "1D"),
    ),
]
