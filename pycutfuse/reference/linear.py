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
    wide: bool = False,
) -> Tensor:
    """program(x @ weight.T). `biased`: whether operand 0 is linear's own bias.

    None, where nobody says: a per-channel add that comes first is taken for it, if it may be.
    `wide`: the layer runs in float64, the program does not.
    """
    if biased is None:
        biased = len(codes) > 0 and codes[0] == OPS["add"] and codes[1] == 0 and weight.dim() == 2
        first = operands[0] if biased else weight
        biased = biased and first.shape == weight.shape[:-1] and first.dtype == weight.dtype
    bias = operands[0] if biased else None
    if wide:
        value = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        value = value.to(x.dtype)
    else:
        value = F.linear(x, weight, bias)
    skipped = 2 if biased else 0
    return apply_program(value, codes[skipped:], constants[skipped:], operands)
