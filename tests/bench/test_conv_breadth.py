"""Random convolutions of every kind: seeded, bounded, verified, and what is said of them."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pycutfuse.bench import report, sizes
from pycutfuse.bench.cases import select
from pycutfuse.bench.conv_breadth import breadth, named, random_breadth
from pycutfuse.bench.results import EAGER, OURS, SizeResult, SizesResult
from pycutfuse.bench.runner import Options, make_reference
from pycutfuse.bench.shapes import ConvShape
from pycutfuse.bench.tiers import TIERS

from .test_report import _run

(CASE,) = select(["conv_breadth"])
MANY = random_breadth(replace(CASE, count=600))
CPU = torch.device("cpu")


def test_sixty_are_seeded():
    found = random_breadth(CASE)
    assert len(set(map(named, found))) == 60
    assert found == random_breadth(CASE) == MANY[:60]
    assert found != random_breadth(replace(CASE, seed=1))


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("batch", 1, 128),
        ("channels", 1, 512),
        ("out_channels", 1, 512),
        ("height", 7, 256),
        ("width", 7, 256),
        ("kernel", 1, 11),
        ("stride", 1, 4),
        ("dilation", 1, 2),
    ],
)
def test_every_range_is_used(name, least, most):
    values = {getattr(shape, name) for shape in MANY}
    assert least <= min(values) <= least + 0.02 * most
    assert 0.9 * most <= max(values) <= most


def test_every_kind_is_among_the_sixty():
    found = MANY[:60]
    assert sum(shape.transposed for shape in found) == 20
    grouped = [shape for shape in found if shape.groups > 1]
    assert 9 <= len(grouped) <= 21
    assert any(shape.groups == shape.channels for shape in grouped)
    assert all(
        shape.channels % s == shape.out_channels % s == 0
        for shape in grouped
        if (s := shape.groups)
    )
    assert any(shape.output_padding for shape in found)
    assert not any(shape.output_padding for shape in found if not shape.transposed)
    assert 20 <= sum(shape.dilation == 2 for shape in found) <= 40


def test_each_is_bounded_in_bytes_and_in_time():
    for shape in MANY:
        for size in (shape.input_size, shape.output_size):
            assert 0 < 4 * math.prod(size) <= 2**28
        # In float64, as they are verified; runner._verify says how the nine results were counted.
        assert 8 * (shape.columns + 9 * math.prod(shape.output_size)) < 8e9
        assert shape.flop < 6e11


def test_sizes_and_operations_are_those_that_torch_counts():
    for case in breadth(replace(CASE.reduced(), count=30)):
        x = torch.rand(case.shape.input_size)
        counter = FlopCounterMode(display=False)
        module = case.reference(case.shape)
        with counter:
            y = module(x)
        assert tuple(y.shape) == case.shape.output_size, case.name
        # torch counts every channel of x for every one of the result, whatever the groups.
        assert counter.get_total_flops() in (case.shape.flop, case.shape.flop * case.shape.groups)


def test_the_replacement_has_the_same_arguments_and_parameters():
    for case in breadth(replace(CASE.reduced(), count=12)):
        reference = make_reference(case, TIERS["ieee"], CPU)
        ours = case.fused(reference)
        assert ours.weight is reference.weight
        assert ours.bias is reference.bias
        for name in ("stride", "padding", "dilation", "groups", "output_padding"):
            assert getattr(ours, name) == getattr(reference, name)


@pytest.mark.parametrize("tier", ["tf32", "bf16"])
@pytest.mark.filterwarnings("ignore::pycutfuse.FallbackWarning")
def test_they_are_verified_on_the_cpu_and_not_timed(tier):
    case = replace(CASE.reduced(), count=6)
    found = sizes.run_sizes(case, Options(tier=tier), CPU)
    assert found.passed, [(e.failure, e.checks) for e in found.entries]
    assert [entry.shape for entry in found.entries] == [case.name for case in breadth(case)]
    assert all(not entry.times for entry in found.entries)


def test_the_report_says_the_share_taken_and_its_mean():
    def entry(ratio, path):
        return SizeResult("8x3x9x9-4k3s1p0", [], path, "why", times={EAGER: ratio, OURS: 1.0})

    entries = [entry(4.0, "fused"), entry(1.0, "fused"), entry(1.0, "hand-over")]
    text = report.markdown(_run(sizes=[SizesResult("conv_breadth", "tf32", entries)]))
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    (row,) = (dict(zip(rows[0], row, strict=True)) for row in rows if "tf32" in row[0])
    assert row["taken"] == "2 (67%)"
    assert row["mean of taken"] == "2.00x"
    assert "Random convolutions of every kind" in text


def test_strings_of_plain_shapes_are_as_results_have_them():
    plain = ConvShape(8, 32, 512, 1024, 32, kernel=3, transposed=True)
    assert str(plain) == "8x32x512x1024-32k3s1p0"
    every = replace(plain, dilation=2, groups=4, stride=2, output_padding=1)
    assert named(every) == "transposed 8x32x512x1024-32k3s2p0d2g4o1"
    assert every.output_size == (8, 32, 1028, 2052)
