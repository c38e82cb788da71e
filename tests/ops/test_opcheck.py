"""torch's own checks of the raw operators: schema, fake kernels, AOT dispatch, dynamic shapes."""

from typing import Any

import pytest
import torch

import pycutfuse as pcf
from pycutfuse.program import encode

PROGRAM = encode((pcf.mul(torch.ones(4)), pcf.gelu(), pcf.add(torch.ones(6, 4))))
AFTER = encode((pcf.mul(2.0), pcf.sub(torch.ones(()))))


def _draw(*shape: int, device: str) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)).to(device) + 0.5


def linear(shape: tuple[int, ...], device: str) -> tuple[Any, ...]:
    operands = [_draw(4, device=device), _draw(6, 4, device=device)]
    if len(shape) == 3:
        operands[1] = _draw(2, 1, 4, device=device)
    weight = _draw(4, 5, device=device)
    x = _draw(*shape, device=device)
    return x, weight, None, None, PROGRAM.codes, PROGRAM.constants, operands, "default"


def batch_norm(training: bool, tracked: bool, device: str) -> tuple[Any, ...]:
    x, weight, *_, codes, constants, operands, precision = linear((6, 5), device)
    stats: tuple[Any, ...] = (None, None, None)
    if tracked:
        stats = (_draw(4, device=device), _draw(4, device=device), torch.tensor(3, device=device))
    affine = (_draw(4, device=device), _draw(4, device=device)) if tracked else (None, None)
    numbers = (training, -1.0 if tracked else 0.1, 1e-5)
    after = (AFTER.codes, AFTER.constants, [_draw(device=device)])
    inner = (None, None, codes, constants, operands)
    return x, weight, *inner, *affine, *stats, *numbers, *after, precision


def narrow(name: str, arguments: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """x, weight and operands of `dtype`; a batch norm's tensors stay float32."""
    x, weight, *rest = arguments
    rest[4] = [operand.to(dtype) for operand in rest[4]]
    return name, (x.to(dtype), weight.to(dtype), *rest)


SAMPLES = {
    "linear": lambda d: ("linear_fused", linear((6, 5), d)),
    "linear_3d": lambda d: ("linear_fused", linear((2, 3, 5), d)),
    "train": lambda d: ("linear_batch_norm", batch_norm(True, True, d)),
    "train_untracked": lambda d: ("linear_batch_norm", batch_norm(True, False, d)),
    "eval": lambda d: ("linear_batch_norm", batch_norm(False, True, d)),
    "half": lambda d: narrow("linear_fused", linear((6, 5), d), torch.float16),
    "bfloat16": lambda d: narrow("linear_fused", linear((6, 5), d), torch.bfloat16),
    "half_train": lambda d: narrow("linear_batch_norm", batch_norm(True, True, d), torch.half),
    "half_eval": lambda d: narrow("linear_batch_norm", batch_norm(False, True, d), torch.half),
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_forward_operator(sample: str, device: torch.device) -> None:
    assert pcf.ops  # registers the operators
    name, arguments = SAMPLES[sample](device.type)
    torch.library.opcheck(getattr(torch.ops.pycutfuse, name).default, arguments)


@pytest.mark.parametrize(
    "needs", [(True,) * 4, (True, False, True, False), (False, True, False, True)]
)
def test_linear_backward_operator(needs: tuple[bool, ...], device: torch.device) -> None:
    x, weight, _, _, codes, constants, operands, precision = linear((6, 5), device.type)
    arguments = (_draw(6, 4, device=device.type), x, weight, codes, constants, operands)
    torch.library.opcheck(
        torch.ops.pycutfuse.linear_fused_backward.default, (*arguments, precision, needs)
    )


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_backward_operator(training: bool, device: torch.device) -> None:
    call = batch_norm(training, True, device.type)
    x, weight, _, _, codes, constants, operands, gamma, beta = call[:9]
    save = _draw(2, 4, device=device.type)
    after, precision = call[15:18], call[18]
    torch.library.opcheck(
        torch.ops.pycutfuse.linear_batch_norm_backward.default,
        (
            *(_draw(6, 4, device=device.type), x, weight, codes, constants, operands),
            *(gamma, beta, save, training, 1e-5, *after, precision, (True,) * 7),
        ),
    )
