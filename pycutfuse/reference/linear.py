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
) -> Tensor:
    """program(x @ weight.T); a leading per-channel add is the bias that torch itself fuses."""
    has_bias = len(codes) > 0 and codes[0] == OPS["add"] and codes[1] == 0
    if has_bias and operands[0].shape == weight.shape[:-1] and weight.dim() == 2:
        value = F.linear(x, weight, operands[0])
        return apply_program(value, codes[2:], constants[2:], operands)
    return apply_program(F.linear(x, weight), codes, constants, operands)
