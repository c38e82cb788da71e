"""Parameters that were never materialised: a call says so and returns no unwritten memory."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import pycutfuse as pcf

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: pcf.nn.Linear(3, 4), (5, 3)),
    "logsumexp": (lambda: pcf.nn.LinearLogSumExp(3, 4), (5, 3)),
    "two layers": (lambda: pcf.nn.LinearSigmoidLinearLogSumExp(3, 4, 5), (5, 3)),
    "norm": (lambda: pcf.nn.LinearScaleBatchNorm1d(3, 4, (4,)), (5, 3)),
    "conv": (lambda: pcf.nn.Conv2d(3, 4, 3), (2, 3, 5, 5)),
    "conv norm": (lambda: pcf.nn.Conv2dBatchNorm2dScale(3, 4, 3, 2.0), (2, 3, 5, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("grad", [True, False])
def test_meta_parameters_are_refused(name: str, grad: bool, device: torch.device) -> None:
    make, shape = LAYERS[name]
    layer, x = make(), torch.rand(shape, device=device)
    with torch.set_grad_enabled(grad):
        with pytest.raises(RuntimeError, match="same device"):
            layer.to("meta")(x)
        with pytest.raises(RuntimeError, match="same device"):
            layer.to_empty(device=device)(x.to("meta"))


def test_one_operand_on_the_meta_device(device: torch.device) -> None:
    x, weight = torch.rand(5, 3, device=device), torch.rand(4, 3, device=device)
    with pytest.raises(RuntimeError, match="same device"):
        pcf.ops.linear(x, weight, epilogue=(pcf.mul(torch.rand(4, device="meta")),))
