"""Random convolutions are seeded, of every kind, bounded, verified and timed."""

import math
from dataclasses import replace

import pytest
import torch

from pycutfuse.bench import sizes
from pycutfuse.bench.case import SizesCase
from pycutfuse.bench.cases import select
from pycutfuse.bench.conv_cases import random_convolutions
from pycutfuse.bench.runner import Options
from pycutfuse.bench.tiers import TIERS

(CASE,) = select(["conv_sizes"])
CPU = torch.device("cpu")


def _is_prime(number):
    return all(number % other for other in range(2, number))


def test_convolutions_are_seeded():
    found = random_convolutions(CASE)
    assert len(found) == len(set(map(str, found))) == 24
    assert found == random_convolutions(CASE)
    assert found != random_convolutions(replace(CASE, seed=1))
    assert found[:4] == random_convolutions(CASE.quick())


def test_every_kind_is_drawn():
    found = random_convolutions(replace(CASE, count=300))
    ranges = {
        "batch": (1, 128),
        "channels": (1, 64),
        "out_channels": (16, 256),
        "kernel": (1, 11),
        "stride": (1, 4),
    }
    for name, (least, most) in ranges.items():
        values = {getattr(shape, name) for shape in found}
        assert least <= min(values) <= 1.1 * least
        assert 0.9 * most <= max(values) <= most
    sides = [side for shape in found for side in (shape.height, shape.width)]
    assert all(side % 2 for side in sides)
    assert sum(map(_is_prime, sides)) > len(sides) / 3
    assert any(shape.height != shape.width for shape in found)
    assert {shape.padding for shape in found} == set(range(6))


def test_no_tensor_is_larger_than_a_gigabyte():
    for shape in random_convolutions(replace(CASE, count=300)):
        for size in (shape.input_size, shape.output_size):
            assert 0 < 4 * math.prod(size) <= 1e9


def test_verifying_stays_below_40_gigabytes():
    for shape in random_convolutions(CASE):
        _, _, height, width = shape.output_size
        columns = shape.channels * shape.kernel**2 * height * width  # of one image
        # Nine results at once; runner._verify says how that was counted.
        assert 8 * (columns + 9 * math.prod(shape.output_size)) < 40e9


@pytest.mark.parametrize("tier", TIERS)
def test_convolutions_are_verified_at_every_tier_on_the_cpu(tier):
    case = replace(CASE.reduced(), count=4)
    found = sizes.run_sizes(case, Options(tier=tier), CPU)
    assert found.passed
    assert [entry.shape for entry in found.entries] == [str(s) for s in random_convolutions(case)]
    assert all(entry.floor_s > 0 and not entry.times for entry in found.entries)
    assert found.fp32_precision["cudnn.conv"] == ("tf32" if tier == "tf32" else "ieee")
    assert (found.mean_of_all, found.taken) == (None, 0)


def test_a_convolution_that_raises_fails_and_is_named(monkeypatch):
    def broken(*_):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(sizes, "_run", broken)
    found = sizes.run_sizes(replace(CASE.reduced(), count=2), Options(), CPU)
    assert [entry.failure for entry in found.entries] == ["RuntimeError: no kernel image"] * 2
    assert found.entries[0].shape == str(random_convolutions(CASE.reduced())[0])


def test_a_first_look_has_at_least_one_size():
    assert SizesCase("sizes", 3, 8, 0).quick().count == 1
