"""What counts as an int of a convolution, and a transposed one without pixels, as torch has it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf

np = pytest.importorskip("numpy")

GIVEN: dict[str, dict[str, Any]] = {
    "stride": {"stride": np.int64(2)},
    "groups": {"groups": np.int64(3)},
    "padding": {"padding": (np.int32(1), 1)},
    "dilation": {"dilation": [np.uint8(1)]},
    "tensor": {"stride": torch.tensor(2), "groups": torch.tensor(3)},
    "bool stride": {"stride": True},
    "bool padding": {"padding": (False, 1)},
    "bool groups": {"groups": True},
    "float tensor": {"stride": torch.tensor(2.0)},
    "two values": {"stride": torch.tensor([2, 2])},
}
if np.lib.NumpyVersion(np.__version__) >= "2.3.0":  # before, torch trips over such a bool
    GIVEN["numpy bool"] = {"stride": np.bool_(True)}


def outcome(namespace: Any, transposed: bool, options: dict[str, Any]) -> Any:
    function = namespace.conv_transpose2d if transposed else namespace.conv2d
    groups = options.get("groups", 1)
    x, weight = torch.ones(2, 3, 5, 6), torch.ones(3, 1 if groups == 3 else 3, 2, 2)
    try:
        return function(x, weight, **options)
    except TypeError as error:
        return type(error)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", GIVEN)
def test_what_is_an_int(name: str, transposed: bool) -> None:
    ours, theirs = (outcome(namespace, transposed, GIVEN[name]) for namespace in (pcf.ops, F))
    if isinstance(theirs, Tensor):
        assert torch.equal(ours, theirs)
    else:
        assert ours is theirs


def test_modules_take_numbers_of_numpy() -> None:
    layer = pcf.nn.Conv2d(np.int64(3), 6, np.int64(2), stride=np.int64(2), groups=np.int64(3))
    x = torch.ones(2, 3, 5, 6)
    assert torch.equal(layer(x), layer.to_torch()(x))
    assert all(type(one) is int for one in (*layer._geometry.stride, layer._geometry.groups))


OPTIONS = {"stride": 2, "padding": 1, "output_padding": 1, "dilation": 2}


@pytest.mark.parametrize("compiled", [False, True])
def test_a_transposed_result_without_pixels(compiled: bool) -> None:
    x, weight = torch.ones(2, 3, 6, 1), torch.ones(3, 3, 4, 1, requires_grad=True)
    call: Any = pcf.ops.conv_transpose2d
    call = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    result = call(x, weight, epilogue=(pcf.relu(),), **OPTIONS)
    assert result.shape == F.conv_transpose2d(x, weight, **OPTIONS).shape == (2, 3, 16, 0)
    result.sum().backward()
    assert torch.equal(weight.grad, torch.zeros(3, 3, 4, 1))


def test_fewer_pixels_are_refused() -> None:
    with pytest.raises(RuntimeError, match="-1 pixels wide"):
        pcf.ops.conv_transpose2d(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 3, 1), padding=1)
