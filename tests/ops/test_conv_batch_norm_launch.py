"""What crosses the border for convolution, batch norm and scale."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse.ops import _conv_batch_norm, _conv_batch_norm_vjp, _conv_launch, _launch
from pycutfuse.ops import _conv_batch_norm_raw as raw
from pycutfuse.ops._conv_call import Call
from pycutfuse.testing import generate, guarded

from ..cases.conv import FEW, ConvCase
from .simulated_conv import ConvBinding, install


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConvBinding]:
    """Host tensors take the road of CUDA tensors."""
    monkeypatch.setattr(raw, "forward", raw._forward_cuda)
    yield install(monkeypatch)
    _launch.clear_caches()


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return generate("randn", shape, seed=seed)


def statistics() -> dict[str, Tensor]:
    found = {"running_mean": draw((6,), 4), "running_var": draw((6,), 5).abs()}
    return found | {"num_batches_tracked": torch.tensor(3)}


BATCHED = [case for case in FEW if case.batch is not None and not case.transposed]


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gapped"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", BATCHED, ids=str)
def test_statistics_and_programs(case, training: bool, layout: str, binding: ConvBinding) -> None:
    tensors = case.draw(draw, layout=layout)
    affine, scale = (draw((6,), 6), draw((6,), 7)), draw((6, 1, 1), 8)
    ours, theirs = statistics(), statistics()
    for launched in (1, 2):
        with guarded():
            result = pcf.ops.conv2d_batch_norm(
                *tensors,
                **case.options,
                epilogue=(pcf.tanh(),),
                training=training,
                after=(pcf.mul(scale), pcf.relu()),
                bn_weight=affine[0],
                bn_bias=affine[1],
                **ours,
            )
        pair = theirs["running_mean"], theirs["running_var"]
        z = F.batch_norm(torch.tanh(case.theirs(*tensors)), *pair, *affine, training)
        expected = (z * scale).relu()
        torch.testing.assert_close(result, expected)
        if layout != "gapped":
            assert result.stride() == expected.stride()
        assert (binding.planned, binding.launched) == (1, launched)
    theirs["num_batches_tracked"] += 2 * training
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name])


@pytest.mark.parametrize("kind", ["bare", "momentum", "affine"])
def test_what_may_be_missing(kind: str, binding: ConvBinding) -> None:
    case = ConvCase(bias=False)
    x, weight, _ = case.draw(draw)
    layer = pcf.nn.Conv2dBatchNorm2dScale(4, 6, (3, 2), 2.0, bias=False, momentum=None)
    layer.conv.weight.data = weight
    layer.bn.track_running_stats = kind != "bare"
    if kind == "affine":
        layer.bn.weight = None
    twin = layer.to_torch()
    statistics = [buffer.clone() for buffer in layer.bn.buffers()]
    result = layer(x)
    after = [buffer.clone() for buffer in layer.bn.buffers()]
    for buffer, value in zip(layer.bn.buffers(), statistics, strict=True):
        buffer.copy_(value)
    torch.testing.assert_close(result, twin(x))
    for buffer, value in zip(layer.bn.buffers(), after, strict=True):
        torch.testing.assert_close(buffer, value)
    assert binding.launched == 1


def test_mean_and_deviation_are_saved_for_backward_only(binding: ConvBinding) -> None:
    layer, x = pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, 2.0), draw((2, 4, 9, 8), 1)
    for _ in range(2):
        with torch.no_grad(), guarded() as guards:
            layer(x)
            assert len(guards.arenas) == 2  # out and workspace
        with guarded() as guards:
            layer(x).sum().backward()
            assert len(guards.arenas) >= 2
    assert layer.conv.weight.grad is not None


@pytest.mark.parametrize(
    ("tail", "mechanism"),
    [
        *(("training", name) for name in ("shift", "implicit")),
        *(("evaluation", name) for name in ("shift", "implicit", "direct")),
    ],
)
def test_backward_convolves_again_by_the_policy_of_forward(
    tail: str, mechanism: str, monkeypatch, binding: ConvBinding
) -> None:
    make, seen = binding.make_conv_plan, []
    gemm = SimpleNamespace(source=int(mechanism == "implicit"))
    fields = {"tile_n": 128 * (mechanism == "shift"), "gemm": gemm}
    fields["direct"] = int(mechanism == "direct")

    def chosen(problem, device, policy):
        seen.append((problem.tail, policy))
        return make(problem, device, policy or SimpleNamespace(**fields, tail=problem.tail))

    monkeypatch.setattr(binding, "make_conv_plan", chosen)
    monkeypatch.setattr(binding, "conv_why_slower", lambda problem, device: None)

    def again(call: Call) -> Tensor:  # without a GPU
        found = _conv_launch.lookup_bare(call, "ieee")
        assert isinstance(found, _conv_launch.ConvRecipe)
        with guarded():
            result = _conv_launch.launch(found, _conv_launch.bare(call))
        torch.testing.assert_close(result, F.conv2d(*call[:3]))
        return result

    monkeypatch.setattr(_conv_batch_norm_vjp, "convolve_again", again)
    x, weight, bias = ConvCase().draw(draw, layout="channels_last")
    operand = draw((6, 1, 1), 6)
    for launched in (2, 4):
        pcf.ops.conv2d_batch_norm(
            *(x, weight.requires_grad_(), bias),
            epilogue=(pcf.mul(operand), pcf.relu()),
            after=(pcf.add(operand),),
            training=tail == "training",
            precision="ieee",
            **statistics(),
        ).sum().backward()
        assert binding.launched == launched
    code = 1 if tail == "training" else 2
    assert seen == [(code, None), (0, SimpleNamespace(**fields, tail=code))]


def test_backward_leaves_to_torch_what_forward_left(monkeypatch, binding: ConvBinding) -> None:
    monkeypatch.setattr(binding, "conv_why_not", lambda problem, device: problem.tail and "no")
    call = _conv_batch_norm.prepare(*ConvCase().draw(draw), training=True)
    assert _conv_launch.lookup_bare(call, "ieee") == _launch.Refusal("no", False)


def test_the_scale_is_an_operand_or_a_constant(binding: ConvBinding) -> None:
    x = draw((2, 4, 9, 8), 1)
    for scale, codes in (
        (2.0, (2, -1)),
        (torch.ones(6, 1, 1), (2, 0)),
        (torch.tensor(2.0), (2, 0)),
    ):
        layer = pcf.nn.Conv2dBatchNorm2dScale(4, 6, 3, scale)
        torch.testing.assert_close(layer(x), layer.to_torch()(x))
        problem = binding.last["problem"]
        assert problem.after[0] == codes
        assert problem.program[0] == (0, 0)
        assert problem.tail == 1
