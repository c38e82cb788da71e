"""1x1 convolutions as matrix products of pixels: what crosses the border, and when."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse import config
from pycutfuse.ops import _conv, _conv_batch_norm_raw, _conv_launch, _gate, _launch
from pycutfuse.ops import _conv_raw as raw
from pycutfuse.testing import generate, guarded

from ..cases.conv import ConvCase, laid_out
from .simulated_conv import ConvBinding, install

CASE = ConvCase(8, 6, (1, 1), (7, 5), 3)
LAST = "channels_last"


@pytest.fixture(autouse=True)
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConvBinding]:
    """Host tensors take the road of CUDA tensors."""
    monkeypatch.setattr(_gate, "_ON_CPU", _gate._DTYPES)
    for one in (raw, _conv_batch_norm_raw):
        monkeypatch.setattr(one, "forward", one._forward_cuda)
    made = install(monkeypatch)
    monkeypatch.setattr(made, "conv_why_slower", lambda problem, device: None)
    yield made
    _launch.clear_caches()


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return generate("randn", shape, seed=seed)


def launch(case: ConvCase, *tensors: Tensor | None, **options: Any) -> tuple[Tensor, bool]:
    """The result, and whether pixels were multiplied as a matrix."""
    prepare = _conv.prepare_conv_transpose2d if case.transposed else _conv.prepare_conv2d
    call = prepare(*tensors, **case.options, **{"precision": "ieee"} | options)
    with guarded():
        result = raw._forward_cuda(*raw.flat(call))
    found = _conv_launch.lookup(call, "ieee")
    return result, isinstance(found, _conv_launch.ConvRecipe) and found.by_pixels


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("batch", [3, 1, None])
@pytest.mark.parametrize(
    ("layout", "taken"),
    [(LAST, True), ("contiguous", False), ("gapped", False), ("permuted", False)],
)
def test_layouts(layout: str, taken: bool, batch: int | None, transposed: bool) -> None:
    case = ConvCase(8, 6, (1, 1), (7, 5), batch, transposed=transposed)
    tensors = case.draw(draw, layout=layout)
    result, by_pixels = launch(case, *tensors)
    expected = case.theirs(*tensors)
    torch.testing.assert_close(result, expected)
    # torch takes one image of pixels for contiguous if the weight does not say otherwise.
    assert by_pixels == (taken and batch is not None)
    if layout in (LAST, "contiguous"):
        assert result.stride() == expected.stride()


def test_the_weights_format_alone_asks_for_pixels_that_lie_apart() -> None:
    """One image of planes is a matrix too, if its result may be channels_last."""
    case = ConvCase(8, 6, (1, 1), (7, 5), 1)
    x, weight, bias = case.draw(draw)
    last = weight.as_strided(weight.shape, (8, 1, 8, 8))
    result, by_pixels = launch(case, x, last, bias)
    expected = case.theirs(x, last, bias)
    torch.testing.assert_close(result, expected)
    assert by_pixels
    assert result.stride() == expected.stride()
    for more in (x.expand(3, -1, -1, -1), draw((3, 8, 7, 5), 6)):
        result, by_pixels = launch(case, more, last, bias)
        torch.testing.assert_close(result, case.theirs(more, last, bias))
        assert not by_pixels


@pytest.mark.parametrize("layout", [LAST, "contiguous"])
@pytest.mark.parametrize("batch", [3, 1, None])
def test_one_pixel(batch: int | None, layout: str) -> None:
    case = ConvCase(8, 6, (1, 1), (1, 1), batch)
    tensors = case.draw(draw, layout=layout)
    result, by_pixels = launch(case, *tensors)
    expected = case.theirs(*tensors)
    torch.testing.assert_close(result, expected)
    assert by_pixels
    assert result.stride() == expected.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_channels_and_pixels_of_a_larger_tensor(dtype: torch.dtype) -> None:
    _, weight, bias = CASE.draw(draw, dtype=dtype)
    whole = laid_out(draw((3, 24, 7, 5), 1), LAST).to(dtype)
    for x, taken in (
        (whole[:, 8:16], True),
        (whole[1:, :8], True),
        (whole[:, 16:, 2:], False),  # rows of pixels, images farther apart
        (whole[:1, 16:, 2:], True),
        (whole[:, :8, :, 1:], False),
        (whole[:, ::3], dtype is torch.float32),
        (whole[:, 3:11], True),  # 16-bit: copied, as it starts between multiples of 16 bytes
    ):
        result, by_pixels = launch(CASE, x, weight, bias)
        torch.testing.assert_close(
            result, CASE.theirs(x.float(), weight.float(), bias.float()).to(dtype)
        )
        assert by_pixels == taken, x.stride()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_addresses(dtype: torch.dtype, binding: ConvBinding) -> None:
    x, weight, bias = CASE.draw(draw, layout=LAST, dtype=dtype)
    expected = CASE.theirs(x.float(), weight.float(), bias.float()).to(dtype)

    def moved(tensor: Tensor, by: int) -> Tensor:
        arena = tensor.new_full((tensor.numel() + by,), float("nan"))
        return arena.as_strided(tensor.shape, tensor.stride(), by).copy_(tensor)

    for shifts in ((0, 0), (1, 0), (0, 1), (3, 4), (8, 16)):
        given = moved(x, shifts[0]), moved(weight, shifts[1])
        result, by_pixels = launch(CASE, *given, bias)
        torch.testing.assert_close(result, expected)
        assert by_pixels
        assert result.stride() == expected.stride()
    assert binding.planned == 2  # the selected policy, and the same forced on copies
    narrow = ConvCase(12, 6, (1, 1), (7, 5), 3)
    assert not launch(narrow, *narrow.draw(draw, layout=LAST, dtype=dtype))[1]


@pytest.mark.parametrize(
    "case",
    [
        ConvCase(8, 6, (3, 1), (7, 5), 3),
        ConvCase(8, 6, (1, 1), (7, 5), 3, stride=2),
        ConvCase(8, 6, (1, 1), (7, 5), 3, padding=1),
        ConvCase(8, 6, (1, 1), (7, 5), 3, groups=2),
        ConvCase(8, 6, (1, 1), (7, 5), 3, transposed=True, stride=2),
        ConvCase(8, 6, (1, 1), (7, 5), 3, transposed=True, dilation=2, output_padding=1),
    ],
    ids=str,
)
def test_other_settings_are_no_matrix_product(case: ConvCase) -> None:
    tensors = case.draw(draw, layout=LAST)
    result, by_pixels = launch(case, *tensors)
    torch.testing.assert_close(result, case.theirs(*tensors))
    assert not by_pixels


@pytest.mark.parametrize("batch", [3, None])
def test_every_operand_that_broadcasts(batch: int | None, binding: ConvBinding) -> None:
    case = ConvCase(8, 6, (1, 1), (7, 5), batch)
    x, weight, bias = case.draw(draw, layout=LAST)
    tensors = x, weight.as_strided(weight.shape, (8, 1, 8, 8)), bias
    value = case.theirs(*tensors)
    full = draw(value.shape, 4)
    operands = [
        torch.tensor(0.5),
        draw((6, 1, 1), 5),
        draw((6, 2, 1), 5)[:, :1],
        full,
        laid_out(full, LAST),
        laid_out(full, "permuted"),
        draw((7, 5), 6),
        draw((7, 1), 7),
        draw((1, 5), 7),
        draw((6, 7, 1), 8),
    ]
    if batch is not None:
        operands += [draw((3, 6, 1, 1), 9), draw((3, 1, 1, 1), 10), full[1:2].expand(3, -1, -1, -1)]
    for operand in operands:
        result, by_pixels = launch(case, *tensors, epilogue=(pcf.mul(operand), pcf.add(operand)))
        torch.testing.assert_close(result, value * operand + operand)
        assert by_pixels
    assert not config.counters()["fallback"]


def test_the_input_may_be_added_to_the_result() -> None:
    case = ConvCase(6, 6, (1, 1), (7, 5), 3)
    x, weight, bias = case.draw(draw, layout=LAST)
    result, by_pixels = launch(case, x, weight, bias, epilogue=(pcf.add(x), pcf.relu()))
    torch.testing.assert_close(result, (case.theirs(x, weight, bias) + x).relu())
    assert by_pixels


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_batch_norm_and_a_residual(training: bool, dtype: torch.dtype, binding) -> None:
    x, weight, _ = CASE.draw(draw, layout=LAST, dtype=dtype)
    affine = [draw((6,), seed) for seed in (3, 4)]
    ours = [draw((6,), 5), draw((6,), 6).abs()]
    theirs = [one.clone() for one in ours]
    residual = laid_out(draw((3, 6, 7, 5), 7), LAST).to(dtype)
    result = pcf.ops.conv2d_batch_norm(
        x,
        weight,
        running_mean=ours[0],
        running_var=ours[1],
        bn_weight=affine[0],
        bn_bias=affine[1],
        training=training,
        after=(pcf.add(residual), pcf.relu()),
        precision="ieee",
    )
    z = F.conv2d(x.float(), weight.float())
    expected = (F.batch_norm(z, *theirs, *affine, training) + residual.float()).relu().to(dtype)
    close = 1e-5 if dtype is torch.float32 else 4e-3
    torch.testing.assert_close(result, expected, rtol=close, atol=close)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other)
    assert binding.launched == 1
    assert binding.last["problem"].pixel_stride == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients(dtype: torch.dtype) -> None:
    x, weight, bias = CASE.draw(draw, layout=LAST, dtype=dtype)
    given = [one.requires_grad_() for one in (x, weight, bias)]
    residual = laid_out(draw((3, 6, 7, 5), 7), LAST).to(dtype).requires_grad_()
    grads = []
    for chain in (
        lambda: pcf.ops.conv2d(*given, epilogue=(pcf.add(residual), pcf.tanh()), precision="ieee"),
        lambda: torch.tanh(F.conv2d(*given) + residual),
    ):
        loss = chain().float().pow(2).sum()
        grads.append(torch.autograd.grad(loss, [*given, residual]))
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.02}
    for own, other in zip(*grads, strict=True):
        torch.testing.assert_close(own, other, **close)
    assert [one.stride() for one in grads[0][:2]] == [one.stride() for one in grads[1][:2]]
