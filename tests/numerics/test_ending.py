"""A sigmoid that stores run on values as they leave gives the bits of the executor's."""

from typing import Any

import pytest
import torch

import pycutfuse as pcf
from pycutfuse.testing import forced_policy, generate, guarded

from .test_integers import every_policy

pytestmark = pytest.mark.cuda

ENDINGS: dict[str, tuple[Any, ...]] = {
    "sigmoid": (pcf.sigmoid(),),
    "mul": (pcf.mul(0.3), pcf.sigmoid(), pcf.mul(-0.7)),
    "add": (pcf.relu(), pcf.sigmoid(), pcf.add(0.1)),
    "sub": (pcf.sigmoid(), pcf.sub(0.3)),
}
NEUTRAL = pcf.maximum(-2.0)  # a last step that no store runs


@every_policy
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("n", [2704, 2701])  # by the copy engine or row by row
def test_bits(policy, dtype, tier: str, ending: str, n: int, fused: None) -> None:
    x = generate("randn", (2500, 300), seed=1, device="cuda", dtype=dtype)
    x[700, 3], x[701, 4], x[2] = torch.inf, torch.nan, 60.0
    weight = generate("randn", (n, 300), seed=2, device="cuda", dtype=dtype)
    with forced_policy(policy), guarded():
        found, expected = (
            pcf.ops.linear(x, weight, epilogue=steps, precision=tier)
            for steps in (ENDINGS[ending], (*ENDINGS[ending], NEUTRAL))
        )
    assert found.isnan().any()
    # Layers of 16 bits that are turned over have a shorter exp: some round to the neighbour.
    turned = policy is None and dtype.itemsize == 2 and ending == "sigmoid" and n % 8 == 0
    rtol, atol = (torch.finfo(dtype).eps, 2.0**-24) if turned else (0.0, 0.0)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)
    assert (found == expected).double().mean() >= 0.99
