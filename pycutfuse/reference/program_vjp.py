"""Gradients of a program as plain torch functions, in torch's own closed forms.

Closed forms and not torch.autograd: a raw operator may run below autograd, under any dispatch mode.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pycutfuse.program import NAMES
from pycutfuse.reference.program import FUNCTIONS

_aten: Any = torch.ops.aten  # untyped

# At a bound torch.clamp passes the gradient up to torch 2.13, and not from 2.14 on.
_above, _below = (torch.gt, torch.lt) if torch.__version__ >= "2.14" else (torch.ge, torch.le)

# g: gradient of the step's result, v: its value before, o: operand or first constant, b: second.
GRADIENTS: dict[str, Callable[[Tensor, Any, Any, float], Tensor]] = {
    "add": lambda g, v, o, b: g,
    "sub": lambda g, v, o, b: g,
    "mul": lambda g, v, o, b: g * o,
    "div": lambda g, v, o, b: g / o,
    "minimum": lambda g, v, o, b: torch.where(_below(v, o), g, 0.0),
    "maximum": lambda g, v, o, b: torch.where(_above(v, o), g, 0.0),
    "relu": lambda g, v, o, b: _aten.threshold_backward(g, v, 0),
    "leaky_relu": lambda g, v, o, b: _aten.leaky_relu_backward(g, v, o, False),
    "sigmoid": lambda g, v, o, b: _aten.sigmoid_backward(g, torch.sigmoid(v)),
    "tanh": lambda g, v, o, b: _aten.tanh_backward(g, torch.tanh(v)),
    "gelu_erf": lambda g, v, o, b: _aten.gelu_backward(g, v),
    "gelu_tanh": lambda g, v, o, b: _aten.gelu_backward(g, v, approximate="tanh"),
    "silu": lambda g, v, o, b: _aten.silu_backward(g, v),
    "mish": lambda g, v, o, b: _aten.mish_backward(g, v),
    "hardswish": lambda g, v, o, b: _aten.hardswish_backward(g, v),
    "clamp": lambda g, v, o, b: torch.where(_above(v, o) & _below(v, b), g, 0.0),
    "hardtanh": lambda g, v, o, b: _aten.hardtanh_backward(g, v, o, b),
    "softplus": lambda g, v, o, b: _aten.softplus_backward(g, v, o, b),
}
OPERAND_GRADIENTS: dict[str, Callable[[Tensor, Any, Tensor], Tensor]] = {
    "add": lambda g, v, o: g,
    "sub": lambda g, v, o: -g,
    "mul": lambda g, v, o: g * v,
    "div": lambda g, v, o: -g * ((v / o) / o),
}
_SUMS = frozenset({"add", "sub"})
_FACTORS = frozenset({"mul", "div"})


def _readers(codes: Sequence[int], needs: Sequence[bool]) -> list[int]:
    """Numbers of the steps whose gradients depend on the value before them.

    `needs` says for each operand whether its gradient is wanted: that of a factor is a function of
    the value, that of a summand is not.
    """
    found = []
    for at, (op, operand) in enumerate(zip(codes[::2], codes[1::2], strict=True)):
        name = NAMES[op]
        if name not in _SUMS and (name not in _FACTORS or (operand >= 0 and needs[operand])):
            found.append(at)
    return found


def reads_value(codes: Sequence[int], needs: Sequence[bool]) -> bool:
    """Whether the gradients depend on the value that enters the program; `needs` as above."""
    return bool(_readers(codes, needs))


@lru_cache(maxsize=1024)
def read_operands(codes: tuple[int, ...], needs: tuple[bool, ...]) -> frozenset[int]:
    """Operands whose values the gradients depend on; of others they ask for the shape.

    Examples
    --------
    >>> codes = {name: code for code, name in NAMES.items()}
    >>> steps = (codes["add"], 0, codes["mul"], 1, codes["add"], 2)
    >>> sorted(read_operands(steps, (True, False, True)))
    [1]
    >>> sorted(read_operands(steps, (True, True, True)))
    [0, 1]
    """
    last = max(_readers(codes, needs), default=-1)
    steps = enumerate(zip(codes[::2], codes[1::2], strict=True))
    return frozenset(
        operand
        for at, (op, operand) in steps
        if operand >= 0 and (at < last or NAMES[op] not in _SUMS)
    )


def program_vjp(
    codes: Sequence[int],
    constants: Sequence[float],
    operands: Sequence[Tensor],
    value: Tensor | None,
    grad: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradients of the value that enters the program, and of the operands that `needs` wants.

    `value` may be None where `reads_value` is false.
    """
    found: list[Tensor | None] = [None] * len(operands)
    steps: list[tuple[str, int, Any, float]] = []
    values: list[Tensor | None] = []
    last = 2 * max(_readers(codes, needs), default=-1)
    for at in range(0, len(codes), 2):
        operand = codes[at + 1]
        other = operands[operand] if operand >= 0 else constants[at]
        steps.append((NAMES[codes[at]], operand, other, constants[at + 1]))
        values.append(value)
        if value is not None:
            runs = at < last
            value = FUNCTIONS[steps[-1][0]](value, other, constants[at + 1]) if runs else None
    for (name, operand, other, second), before in zip(
        reversed(steps), reversed(values), strict=True
    ):
        if operand >= 0 and needs[operand]:
            own = OPERAND_GRADIENTS[name](grad, before, other).sum_to_size(other.shape)
            own = own.to(other.dtype)
            earlier = found[operand]
            found[operand] = own if earlier is None else earlier + own
        grad = GRADIENTS[name](grad, before, other, second)
    return grad, found
