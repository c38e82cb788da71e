"""Global settings are changed inside the block and put back after it, errors included."""

import pytest
import torch

from pycutfuse import config
from pycutfuse.bench import flags


def test_tf32_is_on_inside_and_put_back_after_an_error():
    before = flags.describe_precision()
    inside = {}

    def fail():
        with flags.tf32():
            inside.update(flags.describe_precision())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert inside == {"matmul": "tf32", "cudnn.conv": "tf32"}
    assert flags.describe_precision() == before
    assert torch.backends.cuda.matmul.allow_tf32 is (before["matmul"] == "tf32")


# How a user may have set it, in this torch.
SETTINGS = ["nothing", "old"]
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    SETTINGS.append("new")
# Only where there are two settings can they disagree.
CONV_SETTINGS = [*SETTINGS, "disagreeing"] if "new" in SETTINGS else SETTINGS


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("outside", SETTINGS)
def test_matmul_precision_holds_whatever_the_user_has_set(inside, outside):
    matmul = torch.backends.cuda.matmul
    try:
        if outside == "old":
            torch.set_float32_matmul_precision("high")
        elif outside == "new":
            matmul.fp32_precision = "tf32"
        before = flags.describe_precision()
        with flags.matmul_precision(inside):
            # torch.compile reads both, and raises where they disagree.
            assert torch.get_float32_matmul_precision() == ("high" if inside else "highest")
            assert matmul.allow_tf32 is inside
            assert config.resolve_tier(config.DEFAULT) == ("tf32" if inside else "ieee")
        assert flags.describe_precision() == before
    finally:
        torch.set_float32_matmul_precision("highest")
        if hasattr(matmul, "fp32_precision"):
            matmul.fp32_precision = "none"


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("outside", CONV_SETTINGS)
def test_conv_precision_holds_whatever_the_user_has_set(inside, outside):
    cudnn = torch.backends.cudnn
    try:
        if outside == "old":
            cudnn.allow_tf32 = False
        elif outside in ("new", "disagreeing"):
            cudnn.conv.fp32_precision = "tf32" if outside == "new" else "ieee"
        before = flags.describe_precision()
        with flags.fp32_precision(inside):
            assert cudnn.allow_tf32 is inside  # it raises where the settings disagree
            tier = "tf32" if inside else "ieee"
            assert config.resolve_conv_tier(config.DEFAULT) == tier
            assert flags.in_force() == {"matmul": tier, "cudnn.conv": tier}
        assert flags.describe_precision() == before
        assert flags.in_force()["cudnn.conv"] == (
            "ieee" if outside in ("old", "disagreeing") else "tf32"
        )
    finally:
        cudnn.allow_tf32 = True


def test_cudnn_is_back_after_an_error():
    def fail():
        with flags.without_cudnn():
            assert not torch.backends.cudnn.enabled
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.backends.cudnn.enabled


def test_poison_fills_every_new_tensor_and_is_put_back():
    before = torch.are_deterministic_algorithms_enabled()
    with flags.poisoned_allocations():
        assert torch.empty(1000).isnan().all()
        assert torch.empty_like(torch.zeros(7, 3)).isnan().all()
        assert (torch.empty(1000, dtype=torch.uint8) == 255).all()
        assert torch.zeros(10).eq(0).all()
    assert torch.are_deterministic_algorithms_enabled() is before
