"""The short way to torch of calls that are known to be faster there."""

import torch
from torch import Tensor

from pycutfuse import config
from pycutfuse.ops import _launch


def is_handed_over(operator: str, found: object, x: Tensor, tier: str) -> bool:
    """Whether what was decided of a call is that torch runs it; counts it then.

    The plain chain then answers with torch's own autograd: through the dispatcher it would cost
    three times as much, on problems that are small.
    """
    if not isinstance(found, _launch.Refusal) or found.fallback:
        return False
    if x.dtype is torch.float32 and config.torch_tier() != tier:
        return False  # the chain would run at torch's tier
    config.count_handover(operator, found.reason)
    return True
