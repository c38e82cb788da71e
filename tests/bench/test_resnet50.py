"""The convolutions of ResNet-50: which, verified, and beside the faster of eager and compile."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from pycutfuse.bench import replay, sizes, tables
from pycutfuse.bench.cases import select
from pycutfuse.bench.conv_cases import resnet50
from pycutfuse.bench.results import COMPILE, EAGER, OURS, SizeResult, SizesResult
from pycutfuse.bench.runner import Options, make_reference
from pycutfuse.bench.statistics import Summary
from pycutfuse.bench.tiers import TIERS
from pycutfuse.bench.timing import Timing

CASES = select(["resnet50*"])
CPU = torch.device("cpu")


def test_its_convolutions_follow_each_other() -> None:
    plain, last = (resnet50(case) for case in CASES)
    assert len(plain) == len({str(case.shape) for case in plain}) == 23
    assert [str(case.shape) for case in plain] == [str(case.shape) for case in last]
    assert {case.shape.channels_last for case in last} == {True}
    made = {case.shape.output_size[1:] for case in plain}
    made |= {(64, 56, 56)}  # of the pooling
    assert all(case.shape.input_size[1:] in made for case in plain[1:])
    # How often the network has each, and 4.09e9 multiplications of an image in all.
    counts = (1, 1, 3, 4, 2, 1, 1, 4, 1, 3, 3, 1, 1, 6, 1, 5, 5, 1, 1, 3, 1, 2, 2)
    pairs = zip(counts, plain, strict=True)
    total = sum(count * case.shape.flop / (2 * case.shape.batch) for count, case in pairs)
    assert total == pytest.approx(4.09e9, rel=0.001)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("tier", ["ieee", "bf16"])
def test_they_are_verified(case, tier: str) -> None:
    found = sizes.run_sizes(case.reduced(), Options(tier=tier), CPU)
    assert found.passed, [check for entry in found.entries for check in entry.checks]
    assert found.entries[0].shape == "1x3x224x224-64k7s2p3"


def test_the_chain_that_is_compiled_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile

    def traced(function, mode, dynamic):
        assert (mode, dynamic) == (sizes.DEFAULT, False)
        return compile_(function, backend="eager", fullgraph=True, dynamic=dynamic)

    def interleave(functions, sets, settings):
        assert list(functions) == [EAGER, OURS, COMPILE]
        results = [function() for function in functions.values() for _ in range(sets)]
        for result in results:
            torch.testing.assert_close(result, results[0])
        seconds = {EAGER: 3.0, OURS: 1.0, COMPILE: 2.0}
        return {
            name: Timing(Summary(value, value, value, 1), "") for name, value in seconds.items()
        }

    monkeypatch.setattr(torch, "compile", traced)
    monkeypatch.setattr(replay, "interleave", interleave)
    case = resnet50(replace(CASES[1], largest=2))[13].reduced()
    reference = make_reference(case, TIERS["ieee"], CPU)
    x = case.shape.laid_out(torch.randn(case.shape.input_size))
    result = SizeResult(str(case.shape), [])
    found = sizes._timed(result, reference, x, case.fused, sizes.DEFAULT)
    assert found.ratio() == pytest.approx(2.0)  # to the faster
    assert found.ratio(EAGER) == pytest.approx(3.0)
    with torch.no_grad():
        expected = F.relu(reference.bn(reference.conv(x)))
        torch.testing.assert_close(case.fused(reference)(x), expected)
    text = tables.sizes([SizesResult("resnet50", "tf32", [found])]).text()
    assert "slowest to the faster of eager and compile" in text
    assert "2.00x" in text
