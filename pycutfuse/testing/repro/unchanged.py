"""A call changes none of its inputs, nor what lies between their elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _memory(tensor: Tensor) -> Tensor:
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(tensor.untyped_storage())


def snapshot(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """The bytes of all memory behind `tensors`."""
    found = {name: one for name, one in tensors.items() if isinstance(one, Tensor)}
    return {name: _memory(tensor.detach()).clone() for name, tensor in found.items()}


def changed(tensors: dict[str, Any], before: dict[str, Tensor]) -> str | None:
    """Name the first of `tensors` whose memory is not as it was, or None."""
    for name, bytes_before in before.items():
        if not torch.equal(_memory(tensors[name].detach()), bytes_before):
            return name
    return None
