"""Each tier's dtype, floor of error and cost are what is promised and what the dtype has."""

import pytest
import torch

from pycutfuse.bench.accuracy import limit_for
from pycutfuse.bench.tiers import TIERS, choose


def test_limits_and_products():
    found = {name: (tier.limit, tier.products, tier.planes) for name, tier in TIERS.items()}
    assert found == {
        "ieee": (2.0**-22, 3, 2),
        "tf32": (2.0**-10, 1, 1),
        "fp16": (2.0**-11, 1, 0),
        "bf16": (2.0**-8, 1, 0),
    }


@pytest.mark.parametrize("name", ["ieee", "fp16", "bf16"])
def test_limit_is_that_of_the_dtype_where_only_the_dtype_decides(name):
    assert TIERS[name].limit == limit_for(TIERS[name].dtype)


def test_only_the_tf32_tier_changes_a_flag():
    assert [name for name, tier in TIERS.items() if tier.tf32] == ["tf32"]
    assert TIERS["tf32"].dtype == torch.float32


def test_choice():
    assert [tier.name for tier in choose("bf16")] == ["bf16"]
    assert choose("all") == list(TIERS.values())
