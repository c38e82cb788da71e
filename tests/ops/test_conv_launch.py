"""What crosses the border to the library for a convolution, and what never gets there."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import pycutfuse as pcf
from pycutfuse import config
from pycutfuse.geometry import Geometry, memory_format
from pycutfuse.ops import _conv, _conv_launch, _conv_layout, _launch
from pycutfuse.ops import _conv_raw as raw
from pycutfuse.testing import exact_promotion, generate, guarded

from ..cases.conv import GRID, LAYOUTS, ConvCase
from .simulated_conv import ConvBinding, install


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConvBinding]:
    yield install(monkeypatch)
    _launch.clear_caches()


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return generate("randn", shape, seed=seed)


def launch(case: ConvCase, *tensors: Tensor | None, **options: Any) -> Tensor:
    prepare = _conv.prepare_conv_transpose2d if case.transposed else _conv.prepare_conv2d
    call = prepare(*tensors, **case.options, **{"precision": "ieee"} | options)
    return raw._forward_cuda(*raw.flat(call))


@pytest.mark.parametrize("case", GRID, ids=str)
def test_every_setting_and_layout(case: ConvCase, binding: ConvBinding) -> None:
    for batch in (2, None):
        one = replace(case, batch=batch)
        for layout in LAYOUTS:
            tensors = one.draw(draw, layout=layout)
            expected = one.theirs(*tensors)
            with guarded():
                result = launch(one, *tensors)
            torch.testing.assert_close(result, expected)
            if layout in ("contiguous", "channels_last"):
                assert result.stride() == expected.stride()
    assert binding.launched == 2 * len(LAYOUTS)
    assert binding.last["stream"] == 77
    assert binding.last["promotion"] == 1 + 2**-23


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", [ConvCase(), ConvCase(batch=None, bias=False)], ids=str)
def test_operands(case: ConvCase, layout: str, binding: ConvBinding) -> None:
    tensors = case.draw(draw, layout=layout)
    value = case.theirs(*tensors)
    scalar, vector = torch.tensor(0.5), draw((1, 6, 1, 1)[4 - value.dim() :], 5)
    steps = (pcf.mul(scalar), pcf.add(vector), pcf.tanh())
    result = launch(case, *tensors, epilogue=steps)
    torch.testing.assert_close(result, torch.tanh(value * scalar + vector))
    full = draw(value.shape, 6)
    result = launch(case, *tensors, epilogue=(pcf.add(full),))
    torch.testing.assert_close(result, value + full)
    permuted = full.transpose(-1, -2).contiguous().transpose(-1, -2)
    result = launch(case, *tensors, epilogue=(pcf.add(permuted),))
    torch.testing.assert_close(result, value + full)
    launched = 1 if layout == "channels_last" else 3  # which takes no full operand
    assert binding.launched == launched
    assert sum(config.counters()["fallback"].values()) == 3 - launched


@pytest.mark.parametrize("shape", [(7, 7), (2, 1, 1, 1), (6, 7, 7), (1, 6, 7, 7), (7,)])
def test_an_operand_of_another_shape_falls_back(shape, binding: ConvBinding) -> None:
    case = ConvCase()
    tensors = case.draw(draw)
    operand = draw(shape, 4)
    result = launch(case, *tensors, epilogue=(pcf.add(operand),))
    torch.testing.assert_close(result, case.theirs(*tensors) + operand)
    assert binding.launched == 0
    (reason,) = config.counters()["fallback"]
    assert "neither a scalar" in reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, binding: ConvBinding) -> None:
    case = ConvCase()
    tensors = case.draw(draw, dtype=dtype)
    result = launch(case, *tensors, epilogue=(pcf.relu(),))
    assert result.dtype is dtype
    expected = case.theirs(*(tensor.float() for tensor in tensors)).relu().to(dtype)
    torch.testing.assert_close(result, expected)
    assert binding.last["problem"].precision == 0


def test_a_plan_is_made_once_for_each_kind_of_call(binding: ConvBinding) -> None:
    case = ConvCase()
    x, weight, bias = case.draw(draw)
    for _ in range(3):
        launch(case, x, weight, bias)
    assert (binding.planned, binding.launched) == (1, 3)
    launch(case, x, weight, bias, precision="tf32")
    launch(case, x, weight)
    launch(replace(case, padding=1), x, weight, bias)
    assert binding.planned == 4
    _launch.clear_caches()
    launch(case, x, weight, bias)
    assert binding.planned == 5


def test_memory_formats_of_size_one_are_told_apart(binding: ConvBinding) -> None:
    case = ConvCase(channels=1)
    x, weight, bias = case.draw(draw)
    last = x.as_strided(x.shape, (72, 1, 8, 1))
    assert last.is_contiguous()
    weight = weight.as_strided(weight.shape, (6, 6, 2, 1))
    for one in (x, last):
        expected = case.theirs(one, weight, bias)
        assert launch(case, one, weight, bias).stride() == expected.stride()


def test_a_result_that_cudnn_does_not_pad_is_contiguous_on_a_gpu() -> None:
    """Of transposed convolutions whose output_padding reaches the stride, in any dimension."""
    with FakeTensorMode():
        for device in ("cpu", "cuda"):
            x, weight = torch.empty(2, 4, 9, 8, device=device), torch.empty(4, 6, 3, 2)
            last = x.as_strided(x.shape, (288, 1, 32, 4))
            for stride, extra, big in (
                ((1, 1), (0, 0), False),
                ((1, 1), (0, 1), True),
                ((2, 3), (1, 2), False),
                ((2, 1), (1, 1), True),
                ((3, 2), (2, 2), True),
            ):
                given = Geometry(stride, (0, 0, 0, 0), (3, 3), extra, 1, True)
                plain = device == "cuda" and big
                expected = torch.contiguous_format if plain else torch.channels_last
                assert memory_format(last, weight, given) is expected
                assert memory_format(x, weight, given) is torch.contiguous_format


def test_an_image_that_spans_too_much_is_copied(binding: ConvBinding) -> None:
    """To 2^30 elements, which kernels count in 32 bits."""

    def decided(shape: tuple[int, ...], strides: tuple[int, ...]) -> object:
        x = torch.empty_strided(shape, strides, device="meta")
        weight = torch.empty(4, shape[-3], 1, 1, device="meta")
        return _conv_launch.decide(_conv.prepare_conv2d(x, weight), "ieee")

    for step, copied in ((2**29 - 1, False), (2**29, True), (2**40, True)):
        found = decided((5, 3, 2, 1), (0, step, 0, 7))
        assert isinstance(found, _conv_launch.ConvRecipe)
        assert found.copies_x == copied
        assert found.x_strides == ((6, 2, 1, 1) if copied else (0, step, 0, 7))
    assert getattr(decided((2, 3, 4), (2**50, 2**40, 1)), "x_strides", None) == (24, 12, 4, 1)
    assert not getattr(decided((1, 2**15, 2**15), (2**30, 2**15, 1)), "copies_x", True)
    refused = decided((1, 2**15 + 1, 2**15), (2**31, 2**15, 1))
    assert refused == _launch.Refusal("an image of more than 2^30 elements", False)


@pytest.mark.parametrize("batch", [2, None])
@pytest.mark.parametrize("layout", ["gapped", "channels_last", "permuted"])
def test_a_copied_image(monkeypatch, batch: int | None, layout: str, binding: ConvBinding) -> None:
    case = ConvCase(batch=batch)
    tensors = case.draw(draw, layout=layout)
    call = _conv.prepare_conv2d(*tensors, **case.options, precision="ieee")
    monkeypatch.setattr(_conv_layout, "MAX_SPAN", 4 * 9 * 8)
    for _ in range(2):
        torch.testing.assert_close(launch(case, *tensors), case.theirs(*tensors))
    found = _conv_launch.lookup(call, "ieee")
    assert isinstance(found, _conv_launch.ConvRecipe)
    assert found.copies_x == (layout == "gapped")
    assert binding.launched == 2


def test_what_the_library_refuses_is_handed_over(binding: ConvBinding) -> None:
    case = ConvCase(channels=130)
    tensors = case.draw(draw)
    assert torch.equal(launch(case, *tensors), case.theirs(*tensors))
    assert config.counters()["fallback"] == {}
    (reason,) = config.counters()["handover"]
    assert "128 channels" in reason
    assert binding.launched == 0


@pytest.mark.hands_over
def test_what_is_slower_is_handed_over(binding: ConvBinding) -> None:
    case = ConvCase()
    tensors = case.draw(draw)
    assert torch.equal(launch(case, *tensors), case.theirs(*tensors))
    assert "100 pixels" in next(iter(config.counters()["handover"]))
    assert binding.launched == 0


def test_an_empty_batch_is_torchs(binding: ConvBinding) -> None:
    case = ConvCase(batch=0)
    tensors = case.draw(draw)
    assert launch(case, *tensors).shape == case.theirs(*tensors).shape
    assert binding.launched == 0


def test_an_older_library_falls_back(monkeypatch, binding: ConvBinding) -> None:
    monkeypatch.delattr(ConvBinding, "make_conv_plan")
    case = ConvCase()
    tensors = case.draw(draw)
    assert torch.equal(launch(case, *tensors), case.theirs(*tensors))
    (reason,) = config.counters()["fallback"]
    assert "has no convolutions" in reason


def test_the_promotion_factor_is_passed(binding: ConvBinding) -> None:
    with exact_promotion():
        launch(ConvCase(), *ConvCase().draw(draw))
    assert binding.last["promotion"] == 1


def test_the_default_tier_is_that_of_torchs_convolutions(binding: ConvBinding) -> None:
    case = ConvCase()
    tensors = case.draw(draw)
    outer = torch.backends.cudnn.allow_tf32
    try:
        for allowed, code in ((True, 1), (False, 0)):
            torch.backends.cudnn.allow_tf32 = allowed
            launch(case, *tensors, precision=None)
            assert binding.last["problem"].precision == code
    finally:
        torch.backends.cudnn.allow_tf32 = outer


def test_decided_calls_skip_the_dispatcher(monkeypatch, binding: ConvBinding) -> None:
    case = ConvCase()
    tensors = case.draw(draw)
    launch(case, *tensors)
    monkeypatch.setattr(raw, "forward", None)
    result = pcf.ops.conv2d(*tensors, precision="ieee")
    torch.testing.assert_close(result, case.theirs(*tensors))
    weight = tensors[1].requires_grad_()
    launch_count = binding.launched
    # A parameter's facts are the same, and autograd records the launch.
    result = pcf.ops.conv2d(tensors[0], weight, tensors[2], precision="ieee")
    assert result.requires_grad
    assert binding.launched == launch_count + 1


def test_counts_are_those_of_the_recipe(binding: ConvBinding) -> None:
    case = ConvCase()
    call = _conv.prepare_conv2d(*case.draw(draw), **case.options)
    found = _conv_launch.lookup(call, "tf32")
    assert isinstance(found, _conv_launch.ConvRecipe)
    assert found.workspace_bytes == 1008
    assert found.out_shape == (2, 6, 7, 7)
