"""What ran is read from explain and from the counters, whichever says that PyTorch did."""

import pytest
import torch
from torch import nn

import pycutfuse as pcf
from pycutfuse import config
from pycutfuse.bench import route

pytestmark = pytest.mark.filterwarnings("ignore::pycutfuse.FallbackWarning")


def test_the_cpu_runs_the_reference_chain_and_the_reason_is_kept():
    found = route.observe(pcf.nn.Linear(3, 4), [torch.rand(2, 3)])
    assert (found.path, found.reason) == (route.FALLBACK, "cpu tensors")
    assert found.text.startswith("linear: fallback (cpu tensors)")


class Quiet(nn.Module):
    """A module that explain does not know and that counts what it is told to."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, x):
        self.count()
        return x


@pytest.mark.parametrize(
    ("count", "path", "reason"),
    [
        (lambda: None, route.FUSED, ""),
        (lambda: config.count_handover("op", "faster"), route.HAND_OVER, "op: faster"),
        (lambda: config.report_fallback("op", "odd"), route.FALLBACK, "op: odd"),
    ],
)
def test_counters_decide_where_explain_says_nothing(count, path, reason):
    config.count_handover("op", "faster")  # of an earlier call: it is not of this one
    found = route.observe(Quiet(count), [torch.rand(2)])
    assert (found.path, found.reason) == (path, reason)
    if path != route.FUSED:
        assert found.text.startswith(f"{path} ({reason})")


def test_counting_changes_no_counter_and_no_warning():
    layer, x = pcf.nn.Linear(3, 4), torch.rand(2, 3)
    layer(x)
    before = config.counters()["fallback"]
    route.observe(layer, [x])
    after = config.counters()["fallback"]
    assert sum(after.values()) == sum(before.values()) + 1
