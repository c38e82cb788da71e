"""Learned operands that FSDP or DataParallel made plain attributes are read from there."""

import pytest
import torch
from torch import Tensor, nn

import pycutfuse as pcf


def steps() -> tuple[pcf.program.Step, ...]:
    return (pcf.mul(nn.Parameter(torch.rand(4))), pcf.relu(), pcf.add(torch.rand(4)))


def pixel_steps() -> tuple[pcf.program.Step, ...]:
    return (pcf.mul(nn.Parameter(torch.rand(4, 1, 1))), pcf.relu(), pcf.add(torch.rand(4, 1, 1)))


KINDS = {
    "linear": lambda: pcf.nn.Linear(3, 4, epilogue=steps()),
    "logsumexp": lambda: pcf.nn.LinearLogSumExp(3, 4, epilogue=steps()),
    "norm": lambda: pcf.nn.LinearScaleBatchNorm1d(3, 4, (4,), epilogue=steps()),
    "conv": lambda: pcf.nn.Conv2d(3, 4, 3, epilogue=pixel_steps()),
    "transposed": lambda: pcf.nn.ConvTranspose2d(3, 4, 3, epilogue=pixel_steps()),
    "conv_norm": lambda: pcf.nn.Conv2dBatchNorm2dScale(3, 4, 3, 2.0, epilogue=pixel_steps()),
}


def replicate(layer: nn.Module) -> nn.Module:
    """A replica on the same device, as torch.nn.parallel.replicate makes it."""
    modules = list(layer.modules())
    copies = {module: module._replicate_for_data_parallel() for module in modules}
    for module, made in copies.items():
        for name, child in module._modules.items():
            made._modules[name] = copies[child]
        for name, parameter in module._parameters.items():
            if parameter is None:
                made._parameters[name] = None
            else:
                setattr(made, name, parameter.view_as(parameter))
    return copies[layer]


def flatten(layer: nn.Module) -> nn.Module:
    """Parameters become views of another tensor, as in FSDP with ``use_orig_params=False``."""
    for module in layer.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                delattr(module, name)
                setattr(module, name, parameter.view_as(parameter))
    return layer


@pytest.mark.parametrize("move", [replicate, flatten])
@pytest.mark.parametrize("kind", KINDS)
def test_operands_are_found(kind: str, move) -> None:
    layer = KINDS[kind]().eval()
    x: Tensor = (
        torch.rand(2, 3, 5, 6) if "conv" in kind or kind == "transposed" else torch.rand(5, 3)
    )
    wanted = list(layer.parameters())
    result = layer(x)
    expected = torch.autograd.grad(result.sum(), wanted)
    for _ in range(3):
        found = move(layer)(x)
        torch.testing.assert_close(found, result)
        for one, other in zip(torch.autograd.grad(found.sum(), wanted), expected, strict=True):
            torch.testing.assert_close(one, other)


def test_a_replayed_call_reads_them() -> None:
    step = flatten(pcf.nn.Linear(3, 4, epilogue=steps()).epilogue.get_submodule("0"))
    ((namespace, name),) = step.sources()
    assert namespace[name] is step.weight
