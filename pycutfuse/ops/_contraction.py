"""x @ weight.T at a tier, where torch's chain or a backward needs one."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pycutfuse import config
from pycutfuse.ops import _gate, _launch
from pycutfuse.program import EMPTY


def is_strict(x: Tensor, precision: str) -> bool:
    """Whether torch's own linear would be less accurate than `precision` asks for.

    So an explicit ``"ieee"`` under flags that allow TF32, which are read and never written.
    """
    return _gate.asks_ieee(x, precision) and config.torch_tier() != "ieee"


def torch_linear(x: Tensor, weight: Tensor, precision: str) -> Tensor:
    """torch's linear, never less accurate than `precision` asks for.

    What `is_strict` goes through float64: rare, and the only way torch offers.
    """
    if is_strict(x, precision):
        return F.linear(x.double(), weight.double()).to(x.dtype)
    return F.linear(x, weight)


def contract(x: Tensor, weight: Tensor, precision: str) -> Tensor:
    """x (M, K) @ weight (N, K).T by our kernel where it runs, else by torch; says nothing of it.

    float16 and bfloat16 tensors are torch's: a backward's mostly have K where M belongs, which our
    kernel would copy.
    """
    if x.is_cuda and x.dtype is torch.float32:
        tier = config.resolve_tier(precision)
        found = None if tier == "torch" else _launch.lookup(x, weight, None, EMPTY, (), tier)
        if isinstance(found, _launch.Recipe):
            return _launch.launch(found, (x, weight, None))
    return torch_linear(x, weight, precision)
