"""Gradients of convolutions are torch's, at the tier of forward; statistics are updated once."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse import config
from pycutfuse.ops import _conv, _conv_raw, _convolution, _launch
from pycutfuse.testing import generate

from ..cases.conv import FEW, GRID, ConvCase
from .simulated_conv import ConvBinding, install

CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return generate("randn", shape, seed=seed)


def leaves(case: ConvCase, layout: str = "contiguous", **options) -> list[Tensor]:
    tensors = case.draw(draw, layout=layout, **options)
    return [tensor.detach().requires_grad_() for tensor in tensors if tensor is not None]


def agree(
    ours: Tensor, theirs: Tensor, inputs: list[Tensor], others: list[Tensor], **close
) -> None:
    grad = draw(theirs.shape, 9).to(theirs)
    found = torch.autograd.grad(ours, inputs, grad)
    for one, other in zip(found, torch.autograd.grad(theirs, others, grad), strict=True):
        torch.testing.assert_close(one, other, **(close or CLOSE))
        if one.device.type == "cpu":  # cuDNN chooses its gradients' layout
            assert one.stride() == other.stride()


@pytest.fixture(autouse=True)
def ieee() -> Iterator[None]:
    """float32 beside float32: torch's default tier of convolutions is TF32."""
    outer = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = outer


@pytest.mark.parametrize("case", GRID[::3], ids=str)
def test_gradients(case: ConvCase, device: torch.device) -> None:
    inputs, others = leaves(case, device=device), leaves(case, device=device)
    agree(case.ours(*inputs), case.theirs(*others), inputs, others)


@pytest.mark.parametrize("layout", ["channels_last", "weight_channels_last", "permuted"])
@pytest.mark.parametrize("case", FEW, ids=str)
def test_gradients_of_programs_and_layouts(
    case: ConvCase, layout: str, device: torch.device
) -> None:
    inputs, others = leaves(case, layout, device=device), leaves(case, layout, device=device)
    count = len(inputs)
    value = case.theirs(*others)
    for tensors in (inputs, others):
        for one in (draw((6, 1, 1), 4), draw(value.shape, 5), torch.tensor(0.5)):
            tensors.append(one.to(device).requires_grad_())
    vector, full, scalar = inputs[count:]
    steps = (pcf.mul(vector), pcf.tanh(), pcf.add(full), pcf.div(scalar), pcf.add(vector))
    ours = case.ours(*inputs[:count], epilogue=steps)
    vector, full, scalar = others[count:]
    agree(ours, (torch.tanh(value * vector) + full) / scalar + vector, inputs, others)


@pytest.mark.parametrize("wanted", range(1, 16))
def test_only_wanted_gradients(wanted: int, device: torch.device) -> None:
    case = ConvCase(padding="same", groups=2)
    inputs, others = leaves(case, device=device), leaves(case, device=device)
    for tensors in (inputs, others):
        tensors.append(draw((6, 1, 1), 4).to(device))
        for at, one in enumerate(tensors):
            one.requires_grad_(bool(wanted >> at & 1))
    case.ours(*inputs[:3], epilogue=(pcf.mul(inputs[3]),)).square().sum().backward()
    (case.theirs(*others[:3]) * others[3]).square().sum().backward()
    for one, other in zip(inputs, others, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, **CLOSE)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_the_function_passes_gradcheck(case: ConvCase) -> None:
    inputs = leaves(case, dtype=torch.float64)
    vector = draw((6, 1, 1), 4).double().requires_grad_()
    prepare = _conv.prepare_conv_transpose2d if case.transposed else _conv.prepare_conv2d

    def function(*tensors: Tensor) -> Tensor:
        call = prepare(*tensors[:-1], **case.options, epilogue=(pcf.mul(vector), pcf.tanh()))
        program = (call.program.codes, call.program.constants)
        head = (*call[:4], tuple(call.geometry), program, "default", None)
        return _conv.ConvFunction.apply(*head, tensors[-1])

    assert torch.autograd.gradcheck(function, (*inputs, vector), fast_mode=True)


@pytest.mark.parametrize("case", GRID[::5] + FEW, ids=str)
def test_ieee_gradients_under_flags_that_allow_tf32(case: ConvCase, monkeypatch) -> None:
    monkeypatch.setattr(_convolution, "is_strict", lambda x, precision: precision == "ieee")
    inputs, others = leaves(case), leaves(case)
    agree(case.ours(*inputs, precision="ieee"), case.theirs(*others), inputs, others)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_batch_norm_gradients(
    training: bool, affine: bool, layout: str, device: torch.device
) -> None:
    case = ConvCase(padding=1, stride=2)
    both, stats = [], []
    for _ in range(2):
        tensors = leaves(case, layout, device=device)
        tensors += [draw((6, 1, 1), seed).to(device).requires_grad_() for seed in (4, 5)]
        if affine:
            tensors += [draw((6,), seed).to(device).requires_grad_() for seed in (6, 7)]
        both.append(tensors)
        count = torch.tensor(3, device=device)
        stats.append((draw((6,), 8).to(device), draw((6,), 9).abs().to(device), count))
    inputs, others = both
    names = ("running_mean", "running_var", "num_batches_tracked")
    ours = pcf.ops.conv2d_batch_norm(
        *inputs[:3],
        stride=2,
        padding=1,
        epilogue=(pcf.mul(inputs[3]), pcf.silu()),
        training=training,
        after=(pcf.mul(inputs[4]), pcf.tanh()),
        **dict(zip(names, stats[0], strict=True)),
        **dict(zip(("bn_weight", "bn_bias"), inputs[5:], strict=False)),
    )
    z = F.silu(case.theirs(*others[:3]) * others[3])
    z = F.batch_norm(z, *stats[1][:2], *(others[5:] or (None, None)), training)
    agree(ours, torch.tanh(z * others[4]), inputs, others, rtol=1e-3, atol=1e-4)
    assert int(stats[0][2]) == 3 + training
    for one, other in zip(stats[0][:2], stats[1][:2], strict=True):
        torch.testing.assert_close(one, other)


def test_a_later_forward_does_not_change_an_earlier_backward() -> None:
    layer = pcf.nn.Conv2dBatchNorm2dScale(3, 4, 3, 2.0).eval()
    x = draw((2, 3, 7, 7), 1).requires_grad_()
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    result = layer(x)
    layer.train()
    layer(x + 5)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), x)[0], expected)


def test_gradients_through_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    binding: ConvBinding = install(monkeypatch)
    monkeypatch.setattr(_conv_raw, "forward", _conv_raw._forward_cuda)
    case = ConvCase(padding=1)
    for launched in (1, 2, 3):  # decided, then known
        inputs, others = leaves(case), leaves(case)
        agree(case.ours(*inputs), case.theirs(*others), inputs, others)
        assert binding.launched == launched
    _launch.clear_caches()


def test_double_backward_is_refused() -> None:
    case = ConvCase()
    inputs = leaves(case)
    (grad,) = torch.autograd.grad(case.ours(*inputs).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        grad.sum().backward()


@pytest.mark.cuda
@pytest.mark.parametrize("case", FEW, ids=str)
def test_an_explicit_ieee_never_uses_tf32(case: ConvCase, cuda: torch.device) -> None:
    torch.backends.cudnn.allow_tf32 = True
    inputs, others = leaves(case, device=cuda), leaves(case, device=cuda, dtype=torch.float64)
    ours, theirs = case.ours(*inputs, precision="ieee"), case.theirs(*others)
    grad = draw(theirs.shape, 9).to(cuda)
    found = torch.autograd.grad(ours, inputs, grad)
    for one, other in zip(found, torch.autograd.grad(theirs, others, grad.double()), strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-6
    assert config.torch_conv_tier() == "tf32"
