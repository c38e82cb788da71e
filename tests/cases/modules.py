"""One small module of each kind, and inputs for it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import pycutfuse as pcf

MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: pcf.nn.Linear(3, 4, epilogue=(pcf.relu(),)),
    "logsumexp": lambda: pcf.nn.LinearLogSumExp(3, 4),
    "norm": lambda: pcf.nn.LinearScaleBatchNorm1d(3, 4, (4,)),
    "two linears": lambda: pcf.nn.LinearSigmoidLinearLogSumExp(3, 4, 5),
    "conv": lambda: pcf.nn.Conv2d(3, 4, 2, epilogue=(pcf.relu(),)),
    "transposed": lambda: pcf.nn.ConvTranspose2d(3, 4, 2),
    "conv norm": lambda: pcf.nn.Conv2dBatchNorm2dScale(3, 4, 2, 2.0),
}


def input_of(name: str, batch: int = 2) -> Tensor:
    shape = (batch, 3, 5, 5) if "conv" in name or name == "transposed" else (batch, 3)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))
