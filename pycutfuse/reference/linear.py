"""Linear with a program."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from pycutfuse.program import OPS
from pycutfuse.reference.program import apply_program


def linear(
    x: Tensor,
    weight: Tensor,
    codes: Sequence[int],
    constants: Sequence[float],
    operands: Sequence[Tensor],
    biased: bool | None = None,
) -> Tensor:
    """program(x @ weight.T). `biased`: whether operand 0 is linear's own bias.

    None, where nobody says: a per-channel add that comes first is taken for it, if it may be.
    """
    if biased is None:
        biased = len(codes) > 0 and codes[0] == OPS["add"] and codes[1] == 0 and weight.dim() == 2
        bias = operands[0] if biased else weight
        biased = biased and bias.shape == weight.shape[:-1] and bias.dtype == weight.dtype
    if biased:
        value = F.linear(x, weight, operands[0])
        return apply_program(value, codes[2:], constants[2:], operands)
    return apply_program(F.linear(x, weight), codes, constants, operands)
