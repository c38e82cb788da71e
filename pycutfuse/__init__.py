"""Fused tensor-core kernels for chains of PyTorch modules.

Measured against float64, the error is never above PyTorch's or the tier's rounding, whichever is
larger.

``import pycutfuse as pcf`` loads no kernel, creates no CUDA context and registers no operator;
each part is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "FallbackError": "errors",
    "FallbackWarning": "errors",
    "LibraryUnavailableError": "errors",
    "precision": "config",
    "set_fallback_policy": "config",
    "counters": "config",
    "reset_counters": "config",
    "Step": "program",
    "freeze": "freezing",
    "unfreeze": "freezing",
    "explain": "explaining",
    "Explanation": "explaining",
} | dict.fromkeys(
    (
        "add",
        "sub",
        "mul",
        "div",
        "minimum",
        "maximum",
        "relu",
        "leaky_relu",
        "sigmoid",
        "tanh",
        "gelu",
        "silu",
        "mish",
        "hardswish",
        "hardtanh",
        "clamp",
        "softplus",
    ),
    "program",
)
_MODULES = ("nn", "ops", "reference", "testing", "bench", "support")

__all__ = ["__version__", "nn", "ops", *_HOME]

if TYPE_CHECKING:
    from pycutfuse import nn, ops
    from pycutfuse.config import counters, precision, reset_counters, set_fallback_policy
    from pycutfuse.errors import FallbackError, FallbackWarning, LibraryUnavailableError
    from pycutfuse.explaining import Explanation, explain
    from pycutfuse.freezing import freeze, unfreeze
    from pycutfuse.program import (
        Step,
        add,
        clamp,
        div,
        gelu,
        hardswish,
        hardtanh,
        leaky_relu,
        maximum,
        minimum,
        mish,
        mul,
        relu,
        sigmoid,
        silu,
        softplus,
        sub,
        tanh,
    )


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
