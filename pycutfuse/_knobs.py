"""What `pycutfuse.testing` may change in a launch. Process-wide: backward runs in other threads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pycutfuse._C import ConvPolicy, GemmPolicy

# Takes back the mean truncation of Hopper's accumulator.
DEFAULT_PROMOTION = 1.0 + 2.0**-23


@dataclass
class Knobs:
    """Promotion factor, forced policies, whether slow problems are taken, and who allocates."""

    promotion: float = DEFAULT_PROMOTION
    policy: "GemmPolicy | None" = None
    conv_policy: "ConvPolicy | None" = None
    take_slow: bool = False  # problems that PyTorch is expected to run faster
    empty: Callable[..., Tensor] = torch.empty


knobs = Knobs()
