"""The short way to torch of calls that are known to be faster there."""

import torch
from torch import Tensor

from pycutfuse import config
from pycutfuse.ops import _launch


def is_handed_over(operator: str, found: object, x: Tensor, tier: str) -> bool:
    """Whether what was decided of a call is that torch runs it; counts it then.

    The plain chain then answers: through the dispatcher it would cost three times as much, on
    problems that are small. Not for calls that autograd records: the first of them, before anything
    is decided, goes through the operator, and checkpointing compares what both have saved.
    """
    if not isinstance(found, _launch.Refusal) or found.fallback:
        return False
    if x.dtype is torch.float32 and config.torch_tier() != tier:
        return False  # the chain would run at torch's tier
    config.count_handover(operator, found.reason)
    return True
