"""Convolutions of whole numbers small enough to be exact are exact, under every policy."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse._loader import native
from pycutfuse.testing import exact_promotion, forced_conv_policy, guarded, integers
from pycutfuse.testing.forcing import Kind, conv_kinds_of

from ..cases.conv import KERNEL, KINDS, PATCHES, ConvCase
from ..cases.direct import DIRECT
from .conv_common import wide

pytestmark = pytest.mark.cuda


def policies() -> list[object]:
    found = getattr(native().binding, "compiled_conv_policies", None)
    return [] if found is None else list(found())


every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
every_policy = pytest.mark.parametrize("policy", policies() or [None], ids=repr)
shifted = [policy for policy in policies() if policy.tile_n > 0]  # the others have no strips


# Few channels; rows that the last stack has not.
STACKED = [
    ConvCase(8, 12, (3, 3), (21, 150), 2, padding=1),
    ConvCase(16, 32, (5, 3), (19, 77), 2, padding=(2, 1)),
    ConvCase(3, 8, (4, 4), (41, 131), 3, stride=2, padding=1),
    ConvCase(16, 24, (3, 3), (13, 130), 2, transposed=True),
    ConvCase(8, 12, (3, 3), (67, 150), 13, padding=1),  # several tiles of a strip at a time
]


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return integers(shape, seed=seed)


def exactly(case: ConvCase, kind: Kind, layout: str = "contiguous") -> None:
    dtype, tier = kind
    tensors = case.draw(draw, layout=layout, device="cuda", dtype=dtype)
    vector = draw((case.out_channels, 1, 1), 4).to("cuda", dtype)
    steps = (pcf.add(vector), pcf.relu())
    with exact_promotion(), guarded():
        result = case.ours(*tensors, epilogue=steps, precision=tier)
        interpreted = case.ours(*tensors, epilogue=(*steps, pcf.sub(vector)), precision=tier)
    exact = (case.theirs(*wide(tensors)) + vector.double()).relu()
    assert torch.equal(result, exact.to(dtype)), str(case)  # rounded once
    exact -= vector.double()
    assert torch.equal(interpreted, exact.to(dtype)), str(case)


@every_kind
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gapped"])
@pytest.mark.parametrize("case", KERNEL, ids=str)
def test_selected_policies(kind: Kind, layout: str, case: ConvCase, fused: None) -> None:
    exactly(case, kind, layout)


@every_policy
def test_forced_policies(policy, fused: None) -> None:
    """Each takes at least one of the cases; what it does not take it refuses."""
    assert policy is not None, "the native library has no policy of convolutions"
    taken, refused = 0, []
    with forced_conv_policy(policy):
        cases = DIRECT if policy.direct else PATCHES if policy.patch_n else KERNEL
        for case, kind in product(cases, (one for one in conv_kinds_of(policy) if one in KINDS)):
            try:
                exactly(case, kind)
            except NotImplementedError as error:
                refused.append(f"{case}: {error}")
            else:
                taken += 1
    assert taken > 0, refused


@pytest.mark.parametrize("policy", shifted or [None], ids=repr)
@pytest.mark.parametrize("case", STACKED, ids=str)
def test_stacked_rows(policy, case: ConvCase, fused: None) -> None:
    """In strips, with as many rows of results at once as the instruction has rows for."""
    assert policy is not None, "the native library has no policy of convolutions"
    sizes = (policy.tile_n, policy.planes, policy.element, 1, policy.tile_n - 24, 0, 2)
    with forced_conv_policy(type(policy)(*sizes)):
        for kind in (one for one in conv_kinds_of(policy) if one in KINDS):
            if case is STACKED[1] and (policy.tile_n, policy.planes) == (256, 2):
                # Its weights cannot stay in shared memory, which these tiles need.
                with pytest.raises(NotImplementedError, match="shared memory"):
                    exactly(case, kind)
                continue
            exactly(case, kind)
            if not case.transposed:
                batch_norm(kind, True, case)


@every_kind
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", [KERNEL[0], KERNEL[2], KERNEL[3]], ids=str)
def test_batch_norm(kind: Kind, training: bool, case: ConvCase, fused: None) -> None:
    batch_norm(kind, training, case)


def batch_norm(kind: Kind, training: bool, case: ConvCase) -> None:
    dtype, tier = kind
    tensors = case.draw(draw, device="cuda", dtype=dtype)
    mean = draw((case.out_channels,), 5).cuda()
    var = torch.full((case.out_channels,), 0.25, device="cuda")
    stats = {"running_mean": mean, "running_var": var} if not training else {}
    with exact_promotion(), guarded():
        result = pcf.ops.conv2d_batch_norm(
            *tensors, **case.options, training=training, eps=1e-30, precision=tier, **stats
        )
    z = case.theirs(*wide(tensors))
    if not training:
        exact = (z - mean.double()[:, None, None]) * 2
        assert torch.equal(result, exact.to(dtype))
        return
    exact = F.batch_norm(z, None, None, training=True, eps=1e-30)
    close = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(result.double(), exact, rtol=close, atol=close)


@every_kind
@pytest.mark.parametrize("training", [True, False])
def test_runs_are_bitwise_repeatable(kind: Kind, training: bool, fused: None) -> None:
    options = {"device": "cuda", "dtype": kind[0], "precision": kind[1]}
    layer = pcf.nn.Conv2dBatchNorm2dScale(8, 64, 3, 2.0, **options).train(training)
    x = torch.rand(16, 8, 66, 67, device="cuda", dtype=kind[0])
    with torch.no_grad():
        layer.bn.momentum = 0.0
        first = layer(x)
        assert all(torch.equal(layer(x), first) for _ in range(5))
