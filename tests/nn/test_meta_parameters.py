"""Parameters that were never materialised: a call says so and returns no unwritten memory."""

import pytest
import torch

import pycutfuse as pcf

from ..cases.modules import MODULES, input_of


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("grad", [True, False])
def test_meta_parameters_are_refused(name: str, grad: bool, device: torch.device) -> None:
    layer, x = MODULES[name](), input_of(name).to(device)
    with torch.set_grad_enabled(grad):
        with pytest.raises(RuntimeError, match="same device"):
            layer.to("meta")(x)
        with pytest.raises(RuntimeError, match="same device"):
            layer.to_empty(device=device)(x.to("meta"))


def test_one_operand_on_the_meta_device(device: torch.device) -> None:
    x, weight = torch.rand(5, 3, device=device), torch.rand(4, 3, device=device)
    with pytest.raises(RuntimeError, match="same device"):
        pcf.ops.linear(x, weight, epilogue=(pcf.mul(torch.rand(4, device="meta")),))
