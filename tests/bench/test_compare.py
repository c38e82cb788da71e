"""Both modules have the inputs to themselves, and what only the candidate changes is reported."""

import math

import pytest
import torch
from torch import nn

from pycutfuse.bench.compare import compare_models


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x):
        return x * self.weight + self.offset


class InPlace(Plain):
    def forward(self, x):
        return x.mul_(self.weight).add_(self.offset)


class AddsToParameter(Plain):
    def forward(self, x):
        y = super().forward(x)
        self.weight.data.add_(1.0)
        return y


class AddsToBuffer(Plain):
    def forward(self, x):
        y = super().forward(x)
        self.offset.add_(1.0)
        return y


class Remembers(Plain):
    def forward(self, x):
        Remembers.last = super().forward(x)
        return Remembers.last


class ZeroesWhatModelReturned(Plain):
    def forward(self, x):
        return Remembers.last.zero_()


def _failed(model, candidate, inputs=None, **options):
    inputs = [torch.rand(3, 4)] if inputs is None else inputs
    settings = {"label": "data", "training": False, **options}
    checks = compare_models(model, candidate, inputs, **settings)
    assert checks
    return [check.what for check in checks if not check.passed]


def test_a_candidate_that_works_in_place_is_reported():
    assert _failed(Plain(), InPlace()) == ["data: input 0 was changed, and not by PyTorch"]


def test_two_modules_that_work_in_place_alike_pass():
    x = torch.rand(3, 4)
    before = x.clone()
    assert _failed(InPlace(), InPlace(), [x]) == []
    assert torch.equal(x, before)


def test_an_input_that_the_model_changes_does_not_reach_the_candidate():
    assert _failed(InPlace(), Plain()) == []


def test_parameters_and_buffers_that_the_candidate_changes_are_reported():
    assert _failed(Plain(), AddsToParameter()) == ["data: weight was changed, and not by PyTorch"]
    assert _failed(Plain(), AddsToBuffer()) == ["data: offset was changed, and not by PyTorch"]
    assert _failed(AddsToBuffer(), AddsToBuffer()) == []


def test_a_candidate_cannot_change_what_the_model_returned():
    assert _failed(Remembers(), ZeroesWhatModelReturned()) == ["data: output"]


class Returns(Plain):
    def __init__(self, *results):
        super().__init__()
        self.results = results

    def forward(self, x):
        return list(self.results)


@pytest.mark.parametrize(
    ("results", "failed"),
    [
        ([torch.full((3,), math.nan)], "data: output (nothing compared: no element is finite)"),
        ([torch.full((3,), -math.inf)], "data: output (nothing compared: no element is finite)"),
        ([torch.empty(0, 4)], "data: output (nothing compared: the result is empty)"),
        ([torch.empty(0), torch.ones(2)], None),
        ([torch.tensor([1.0, math.nan])], None),
    ],
    ids=["NaN", "infinite", "empty", "one is empty", "one element is NaN"],
)
def test_results_that_say_nothing_do_not_pass(results, failed):
    assert _failed(Returns(*results), Returns(*results)) == ([failed] if failed else [])


@pytest.mark.parametrize(
    ("theirs", "ours", "passed"),
    [
        (torch.tensor([True, False]), torch.tensor([True, False]), True),
        (torch.tensor([True, False]), torch.tensor([True, True]), False),
        (torch.tensor([3, 4]), torch.tensor([3, 4]), True),
        (torch.tensor([3, 4]), torch.tensor([3, 5]), False),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]), True),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2.1j]), False),
        (torch.ones(2), torch.ones(2, device="meta"), False),
        (torch.ones(2), torch.ones(2).to_sparse(), False),
    ],
)
def test_results_of_any_dtype_and_device_are_judged(theirs, ours, passed):
    failed = _failed(Returns(theirs), Returns(ours))
    assert (failed == []) is passed
    assert all(what.startswith("data: output") for what in failed)


def test_tensors_in_nested_inputs_are_float64_in_the_reference_and_copied_for_each_forward():
    class Nested(Plain):
        def forward(self, pair, more):
            x, (y,) = pair
            assert x.dtype == y.dtype == self.weight.dtype
            return super().forward(x.add_(y)) @ more["z"]

    inputs = [[torch.rand(3, 4), (torch.rand(3, 4),)], {"z": torch.rand(4, 2), "n": 2}]
    assert _failed(Nested(), Nested(), inputs) == []
