"""The short way to torch of calls that are known to be faster there."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pycutfuse import config
from pycutfuse.ops import _launch
from pycutfuse.program import EMPTY, Encoded


def handed_over(
    operator: str,
    tensors: Sequence[Tensor | None],
    program: Encoded,
    tier: str,
    tail: str = "none",
    after: Encoded = EMPTY,
) -> bool:
    """Whether a call like this one is known to be torch's; counts it then.

    The plain chain answers it with torch's own autograd: through the dispatcher it would cost
    three times as much, on problems that are small.
    """
    if config.torch_tier() != tier and tensors[0] is not None and tensors[0].dtype is torch.float32:
        return False  # the chain would run at torch's tier
    try:
        found = _launch._recipes.get(_launch._key(tensors, program, tier, tail, after))
    except (AttributeError, RuntimeError):
        return False
    if not isinstance(found, _launch.Refusal) or found.fallback:
        return False
    config.count_handover(operator, found.reason)
    return True
