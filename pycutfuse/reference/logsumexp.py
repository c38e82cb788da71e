"""Logsumexp."""

from collections.abc import Sequence

import torch
from torch import Tensor


def logsumexp(x: Tensor, dims: Sequence[int], keepdim: bool, wide: bool = False) -> Tensor:
    """log(sum(exp(x))) over `dims`; `wide`: in fp32, as torch's autocast."""
    return torch.logsumexp(x.float() if wide else x, tuple(dims), keepdim)
