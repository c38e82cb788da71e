"""Every setting, layout and batch gives torch's result, in torch's memory format."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse.testing import generate

from ..cases.conv import FEW, GRID, LAYOUTS, ConvCase, batches


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return generate("randn", shape, seed=seed)


@pytest.mark.parametrize("case", GRID, ids=str)
def test_is_torch_on_the_cpu(case: ConvCase) -> None:
    for one in batches(case):
        for layout in LAYOUTS:
            tensors = one.draw(draw, layout=layout)
            result, expected = one.ours(*tensors), one.theirs(*tensors)
            assert torch.equal(result, expected), layout
            if layout not in ("gapped", "permuted") or one.batch is not None:
                assert result.stride() == expected.stride(), layout


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", FEW, ids=str)
def test_other_dtypes_run_as_torchs_chain(case: ConvCase, dtype: torch.dtype) -> None:
    tensors = case.draw(draw, dtype=dtype)
    result = case.ours(*tensors, epilogue=(pcf.relu(),))
    assert result.dtype is dtype
    assert torch.equal(result, case.theirs(*tensors).relu())
    assert sum(pcf.counters()["fallback"].values()) == 1


@pytest.mark.parametrize("case", FEW, ids=str)
def test_programs(case: ConvCase) -> None:
    tensors = case.draw(draw)
    value = case.theirs(*tensors)
    vector, full, scalar = draw((6, 1, 1), 4), draw(value.shape, 5), torch.tensor(0.5)
    steps = (pcf.mul(vector), pcf.gelu(approximate="tanh"), pcf.add(full), pcf.sub(scalar))
    expected = F.gelu(value * vector, approximate="tanh") + full - scalar
    assert torch.equal(case.ours(*tensors, epilogue=steps), expected)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm(groups: int, training: bool, momentum: float | None) -> None:
    case = ConvCase(groups=groups, padding=1)
    x, weight, bias = case.draw(draw)
    affine, scale = (draw((6,), 4), draw((6,), 5)), draw((6, 1, 1), 6)
    ours, theirs = [(draw((6,), 7), draw((6,), 8).abs(), torch.tensor(4)) for _ in range(2)]
    options: dict[str, Any] = {"bn_weight": affine[0], "bn_bias": affine[1], "training": training}
    options |= dict(zip(("running_mean", "running_var", "num_batches_tracked"), ours, strict=True))
    result = pcf.ops.conv2d_batch_norm(
        *(x, weight, bias, 1, 1, 1, groups),
        epilogue=(pcf.mul(scale), pcf.relu()),
        momentum=momentum,
        after=(pcf.mul(2.0), pcf.silu()),
        **options,
    )
    theirs[2].add_(training)
    factor = 1 / float(theirs[2]) if momentum is None else momentum
    z = (case.theirs(x, weight, bias) * scale).relu()
    expected = F.batch_norm(z, *theirs[:2], *affine, training, factor)
    assert torch.equal(result, F.silu(expected * 2.0))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_batch_norm_of_no_images() -> None:
    x, weight = torch.empty(0, 3, 5, 5), torch.ones(4, 3, 3, 3)
    result = pcf.ops.conv2d_batch_norm(x, weight, training=True)
    assert result.shape == (0, 4, 3, 3)


def test_the_reference_is_counted_as_a_fallback() -> None:
    pcf.ops.conv2d(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 1, 1))
    pcf.ops.conv_transpose2d(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 1, 1))
    reasons = pcf.counters()["fallback"]
    assert reasons == {"conv2d: cpu tensors": 1, "conv_transpose2d: cpu tensors": 1}
