"""A program as plain torch functions."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pycutfuse.program import NAMES

# v: the value, o: the operand (a Tensor) or the first constant (a float), b: the second constant.
FUNCTIONS: dict[str, Callable[[Tensor, Any, float], Tensor]] = {
    "add": lambda v, o, b: v + o,
    "sub": lambda v, o, b: v - o,
    "mul": lambda v, o, b: v * o,
    "div": lambda v, o, b: v / o,
    "minimum": lambda v, o, b: torch.clamp(v, max=o),
    "maximum": lambda v, o, b: torch.clamp(v, min=o),
    "relu": lambda v, o, b: torch.relu(v),
    "leaky_relu": lambda v, o, b: F.leaky_relu(v, o),
    "sigmoid": lambda v, o, b: torch.sigmoid(v),
    "tanh": lambda v, o, b: torch.tanh(v),
    "gelu_erf": lambda v, o, b: F.gelu(v),
    "gelu_tanh": lambda v, o, b: F.gelu(v, approximate="tanh"),
    "silu": lambda v, o, b: F.silu(v),
    "mish": lambda v, o, b: F.mish(v),
    "hardswish": lambda v, o, b: F.hardswish(v),
    "clamp": lambda v, o, b: torch.clamp(v, o, b),
    "hardtanh": lambda v, o, b: F.hardtanh(v, o, b),
    "softplus": lambda v, o, b: F.softplus(v, o, b),
}
_BY_CODE = {code: FUNCTIONS[name] for code, name in NAMES.items()}


def apply_program(
    value: Tensor, codes: Sequence[int], constants: Sequence[float], operands: Sequence[Tensor]
) -> Tensor:
    """Apply an encoded program (see `pycutfuse.program.encode`) to `value`."""
    for at in range(0, len(codes), 2):
        operand = codes[at + 1]
        other = operands[operand] if operand >= 0 else constants[at]
        value = _BY_CODE[codes[at]](value, other, constants[at + 1])
    return value
