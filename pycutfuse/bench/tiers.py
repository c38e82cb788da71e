"""The precision tiers that are measured: dtype, torch's flags, allowed error, cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tier:
    """One way to run a case, the same for PyTorch and for us.

    Attributes
    ----------
    name : str
    dtype : torch.dtype
        Of the model and its inputs.
    tf32 : bool
        Whether torch's flags allow TF32 for fp32 matrix products and convolutions. By default
        they do for convolutions only.
    products : int
        fp16 tensor-core products that one product costs.
    planes : int
        fp16 planes that a contraction reads of each operand; 0: the tensors themselves.
    limit : float
        Error against float64 that always passes.
    setting : str
        Dtype and flags in words, for headings.
    """

    name: str
    dtype: torch.dtype
    tf32: bool
    products: int
    planes: int
    limit: float
    setting: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


_FP32 = "fp32 tensors, TF32 "
_ALL = (
    Tier("ieee", torch.float32, False, 3, 2, 2.0**-22, _FP32 + "off (default of matrix products)"),
    Tier("tf32", torch.float32, True, 1, 1, 2.0**-10, _FP32 + "allowed (default of convolutions)"),
    Tier("fp16", torch.float16, False, 1, 0, 2.0**-11, "model and inputs in float16"),
    Tier("bf16", torch.bfloat16, False, 1, 0, 2.0**-8, "model and inputs in bfloat16"),
)

TIERS: dict[str, Tier] = {tier.name: tier for tier in _ALL}
"""By name, in the order of reports."""


def choose(name: str) -> list[Tier]:
    """The tier of that name, or every tier for ``"all"``.

    Examples
    --------
    >>> [tier.name for tier in choose("all")]
    ['ieee', 'tf32', 'fp16', 'bf16']
    """
    return list(TIERS.values()) if name == "all" else [TIERS[name]]
