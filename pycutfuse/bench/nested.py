"""Tensors among the arguments of a forward, at any depth of lists, tuples and dictionaries."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

pytree: Any = _pytree  # partly untyped


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `function` of each tensor in its place.

    Examples
    --------
    >>> mapped(torch.neg, [torch.tensor(1), {"mask": torch.tensor(2)}, "text"])
    [tensor(-1), {'mask': tensor(-2)}, 'text']
    """
    return pytree.tree_map_only(Tensor, function, value)


def found(value: Any) -> list[Tensor]:
    """The tensors in `value`, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def copied(value: Any) -> Any:
    """`value` with tensors of the same strides in memory of their own."""
    return mapped(lambda tensor: copy.deepcopy(tensor.detach()), value)


def doubled(value: Any) -> Any:
    """`value` with float64 copies of its floating-point tensors."""
    return mapped(lambda t: t.double() if t.is_floating_point() else t, copied(value))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether shape, dtype and every bit are equal."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(value: Tensor) -> Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)
