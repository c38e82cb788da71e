"""Plans as cutfuse/conv.h allows them and no operator asks for; run by test_kernels.py."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pycutfuse.testing import generate

from .plugin import binding

NOTHING = binding.Program([], [])
DEVICE = binding.DeviceProps(sm_count=4)
SIZE = 8
BEHIND = 1 << 16  # bytes


def pixels(x: Tensor, weight: Tensor, out: int, **options: Any) -> Any:
    """A 1x1 convolution of a square image, with results of `out` rows and columns."""
    sizes = (*x.shape, weight.shape[0], *(1, 1), *(1, 1), *(0, 0), *(1, 1), 1, out, out)
    dtype = {torch.float32: 0, torch.bfloat16: 2}[x.dtype]
    return binding.ConvProblem(*sizes, False, NOTHING, 0, NOTHING, 1, dtype, **options)


def aligned(size: int) -> tuple[int, Tensor]:
    owner = torch.full((size + 256,), 255, dtype=torch.uint8)
    return owner.data_ptr() + -owner.data_ptr() % 256, owner


def run(plan: Any, x: Tensor, weight: Tensor, out: Tensor) -> None:
    (workspace, _one), (packed, _other) = aligned(plan.workspace_bytes), aligned(plan.packed_bytes)
    binding.pack_conv_weight(plan, weight.data_ptr(), weight.stride(), packed, 0)
    given = (x.data_ptr(), x.stride(), weight.data_ptr(), weight.stride(), packed, [], [])
    binding.run_conv(plan, *given, out.data_ptr(), None, 0.1, 1e-5, workspace, 1.0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out", [SIZE - 2, SIZE, SIZE + 3])
def test_results_beyond_the_image_are_of_zeros(out: int, dtype: torch.dtype) -> None:
    x = generate("randn", (2, 64, SIZE, SIZE), seed=1).to(dtype)
    weight = generate("randn", (24, 64, 1, 1), seed=2).to(dtype)
    problem = pixels(x, weight, out, pixel_stride=int(dtype == torch.float32))
    exact = F.conv2d(F.pad(x.double(), (0, 3, 0, 3)), weight.double())[..., :out, :out]
    taken = 0
    for policy in [
        None,
        *(binding.ConvPolicy(0, gemm=binding.GemmPolicy(0, 0, source=i)) for i in (1, 2)),
    ]:
        try:
            plan = binding.make_conv_plan(problem, DEVICE, policy)
        except NotImplementedError:
            continue
        memory = torch.full((exact.numel() + BEHIND,), 7.0, dtype=dtype)
        result, behind = memory.split([exact.numel(), BEHIND])
        run(plan, x, weight, result)
        assert (behind == 7.0).all()
        assert (result.view_as(exact) - exact).norm() < 4e-3 * exact.norm()
        taken += 1
    assert taken >= 2


def test_a_frozen_weight_of_few_channels_is_read_as_it_is() -> None:
    x = generate("randn", (2, 80, SIZE, SIZE), seed=1).to(memory_format=torch.channels_last)
    weight = generate("randn", (4, 80, 1, 1), seed=2)
    problem = pixels(x, weight, SIZE, channels_last=True, pixel_stride=80, packed_weight=True)
    plan = binding.make_conv_plan(problem, DEVICE, binding.ConvPolicy(0))
    assert plan.policy.gemm.arch == 0
    assert plan.packed_bytes == 0
    out = torch.empty(2, 4, SIZE, SIZE).to(memory_format=torch.channels_last)
    run(plan, x, weight, out)
    exact = F.conv2d(x.double(), weight.double())
    assert (out - exact).norm() < 1e-6 * exact.norm()


def test_memory_of_another_alignment_is_refused() -> None:
    x, weight = generate("randn", (2, 64, 8, 8), seed=1), generate("randn", (24, 64, 1, 1), seed=2)
    out, (at, _owner) = torch.empty(2, 24, 8, 8), aligned(1 << 20)
    for policy in (p for p in binding.compiled_conv_policies() if p.direct == 0):
        problem = pixels(x, weight, SIZE, packed_weight=True, pixel_stride=1)
        try:
            plan = binding.make_conv_plan(problem, DEVICE, policy)
        except NotImplementedError:
            continue
        for packed, workspace in ((at + 16, at), (0, at), (at, at + 16), (at, 0)):
            needed = plan.packed_bytes if workspace == at else plan.workspace_bytes
            if needed == 0:
                continue
            given = (x.data_ptr(), x.stride(), weight.data_ptr(), weight.stride(), packed, [], [])
            with pytest.raises(ValueError, match="aligned to 256 bytes"):
                binding.run_conv(plan, *given, out.data_ptr(), None, 0.1, 1e-5, workspace, 1.0, 0)
