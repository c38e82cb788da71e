"""Global torch settings changed for the length of a ``with`` block, and put back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils import deterministic as _deterministic

from pycutfuse import config

deterministic: Any = _deterministic  # its settings are properties that no stub knows


@contextmanager
def matmul_precision(tf32: bool) -> Iterator[None]:
    """Allow PyTorch TF32 for fp32 matrix products, or forbid it, whatever the user has set.

    ``torch.set_float32_matmul_precision`` moves the old setting and the new one together: where
    they disagree, torch.compile raises.
    """
    saved = _legacy_precision()
    new = [backend.fp32_precision for backend in _matmul_backends()]
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(saved)
        for backend, value in zip(_matmul_backends(), new, strict=True):
            backend.fp32_precision = value


@contextmanager
def conv_precision(tf32: bool) -> Iterator[None]:
    """Allow PyTorch TF32 for fp32 convolutions, or forbid it, whatever the user has set.

    The old setting is written, which moves the new one: where they disagree, reading it raises.
    """
    cudnn: Any = torch.backends.cudnn
    saved = _legacy_allow_tf32()
    new = [backend.fp32_precision for backend in _cudnn_backends()]
    cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        cudnn.allow_tf32 = saved
        for backend, value in zip(_cudnn_backends(), new, strict=True):
            backend.fp32_precision = value


@contextmanager
def fp32_precision(tf32: bool) -> Iterator[None]:
    """`matmul_precision` and `conv_precision`."""
    with matmul_precision(tf32), conv_precision(tf32):
        yield


def tf32() -> AbstractContextManager[None]:
    """PyTorch's TF32 for matrix products and convolutions."""
    return fp32_precision(True)


def in_force() -> dict[str, str]:
    """What PyTorch's flags of now make of fp32 operands: ``"ieee"`` or ``"tf32"``."""
    return {"matmul": config.torch_tier(), "cudnn.conv": config.torch_conv_tier()}


@contextmanager
def without_cudnn() -> Iterator[None]:
    """PyTorch's own kernels in place of cuDNN's.

    They convolve one image after the other by a matrix product: float64 at the tensor cores' rate,
    and the workspace is that of one image.
    """
    cudnn: Any = torch.backends.cudnn
    saved = cudnn.enabled
    cudnn.enabled = False
    try:
        yield
    finally:
        cudnn.enabled = saved


def _matmul_backends() -> list[Any]:
    """Whose new setting ``set_float32_matmul_precision`` writes; none in older torch."""
    mkldnn: Any = torch.backends.mkldnn
    return [torch.backends.cuda.matmul, mkldnn.matmul] if _has_new() else []


def _legacy_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # only the new setting was written, and the old one disagrees
        return "highest"


def _cudnn_backends() -> list[Any]:
    """Whose new setting ``cudnn.allow_tf32`` writes; none in older torch."""
    cudnn: Any = torch.backends.cudnn
    return [cudnn.conv, cudnn.rnn] if _has_new() else []


def _legacy_allow_tf32() -> bool:
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # only the new setting was written, and the old one disagrees
        return True


def _has_new() -> bool:
    return hasattr(torch.backends.cuda.matmul, "fp32_precision")


def describe_precision() -> dict[str, str]:
    """The flags that choose PyTorch's fp32 arithmetic, as the user has them."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    if _has_new():
        return {"matmul": matmul.fp32_precision, "cudnn.conv": cudnn.conv.fp32_precision}
    return {
        "matmul": "tf32" if matmul.allow_tf32 else "ieee",
        "cudnn.conv": "tf32" if cudnn.allow_tf32 else "ieee",
    }


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fill every newly allocated tensor with NaN (255 in bytes), so that nothing is left unwritten.

    Torch fills uninitialised memory in deterministic mode; its warnings about operators without a
    deterministic form are of no interest here and are silenced.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*[Dd]eterministic.*")
            yield
    finally:
        deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@contextmanager
def quiet_fallback(quiet: bool) -> Iterator[None]:
    """Silence the fallback warning, if `quiet`, where the command has said so already."""
    outer = config.set_fallback_policy("silent") if quiet else None
    try:
        yield
    finally:
        if outer is not None:
            config.set_fallback_policy(outer)
