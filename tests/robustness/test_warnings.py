"""The warning about a fallback names the line of the user that caused it."""

import inspect
import warnings

import pytest
import torch

import pycutfuse as pcf


@pytest.fixture(autouse=True)
def warn_anew():
    pcf.reset_counters()
    outer = pcf.set_fallback_policy("warn once")
    yield
    pcf.set_fallback_policy(outer)


@pytest.mark.parametrize("grad", [False, True])
def test_the_line_is_the_users(grad):
    x = torch.rand(3, 4, dtype=torch.float64, requires_grad=grad)
    layer = pcf.nn.Linear(4, 2).double()
    calls = [lambda: layer(x), lambda: pcf.ops.linear(x, layer.weight)]
    for call in calls:
        pcf.reset_counters()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        (warning,) = [w for w in caught if issubclass(w.category, pcf.FallbackWarning)]
        assert warning.filename == __file__
        assert warning.lineno == inspect.getsourcelines(call)[1]
