"""LinearScaleBatchNorm1d behaves as its children: options, hooks, parametrizations, odd inputs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pycutfuse as pcf

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def pair(device: torch.device, **options) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(2)
    ours = pcf.nn.LinearScaleBatchNorm1d(7, 5, (5,), device=device, **options)
    return ours, copy.deepcopy(ours.to_torch())


def same(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    one, other = ours(x), theirs(x)
    torch.testing.assert_close(one, other, **CLOSE)
    for name, tensor in theirs.named_buffers():
        torch.testing.assert_close(dict(ours.named_buffers())[name], tensor, **CLOSE)


def both(change, *modules: nn.Module) -> None:
    for module in modules:
        change(module.bn)


@pytest.mark.parametrize("momentum", [0.1, None, 0.0, 1.0])
@pytest.mark.parametrize(
    "change",
    [
        lambda bn: None,
        lambda bn: bn.eval(),
        lambda bn: setattr(bn, "weight", None) or setattr(bn, "bias", None),
        lambda bn: setattr(bn, "bias", None),
        lambda bn: setattr(bn, "track_running_stats", False),
        lambda bn: setattr(bn, "num_batches_tracked", None),
        lambda bn: [setattr(bn, name, None) for name in ("running_mean", "running_var")],
        lambda bn: setattr(bn, "eps", 0.5),
    ],
    ids="none eval no_affine no_bias untracked uncounted no_statistics eps".split(),
)
def test_options_of_the_batch_norm(momentum, change, device: torch.device) -> None:
    ours, theirs = pair(device, momentum=momentum)
    both(change, ours, theirs)
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        if step == 2:
            ours.train(not ours.training)
            theirs.train(ours.training)
        same(ours, theirs, torch.randn(9, 7, generator=generator).to(device) + step)


def test_an_untracked_norm_as_constructed(device: torch.device) -> None:
    ours, theirs = pair(device)
    for module in (ours, theirs):
        module.bn = nn.BatchNorm1d(5, track_running_stats=False, affine=False, device=device)
    for training in (True, False):
        ours.train(training)
        theirs.train(training)
        same(ours, theirs, torch.randn(9, 7, device=device))


@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (1, 5), (9, 5), (9, 1), (1, 1)], ids=lambda shape: str(shape)
)
def test_scales_of_every_shape(shape, device: torch.device) -> None:
    ours = pcf.nn.LinearScaleBatchNorm1d(7, 5, shape, device=device)
    same(ours, copy.deepcopy(ours.to_torch()), torch.randn(9, 7, device=device))


def test_a_scale_that_grows_the_batch(device: torch.device) -> None:
    x = torch.randn(1, 7, device=device)
    for training in (False, True):  # whose statistics are those of 6 rows
        ours = pcf.nn.LinearScaleBatchNorm1d(7, 5, (6, 5), device=device).train(training)
        theirs = copy.deepcopy(ours.to_torch())
        assert ours(x).shape == theirs(x).shape == (6, 5)
        same(ours, theirs, x)


def test_three_dimensional_input_as_the_chain(device: torch.device) -> None:
    ours = pcf.nn.LinearScaleBatchNorm1d(7, 5, (5,), device=device)
    same(ours, copy.deepcopy(ours.to_torch()), torch.randn(4, 5, 7, device=device))
    with pytest.raises((RuntimeError, ValueError)):
        ours(torch.randn(4, 3, 7, device=device))


def test_an_empty_batch(device: torch.device) -> None:
    ours, theirs = pair(device)
    same(ours, theirs, torch.randn(0, 7, device=device))
    assert int(ours.bn.num_batches_tracked) == 1


@pytest.mark.parametrize("child", ["gemm", "bn"])
@pytest.mark.parametrize(
    "kind", ["forward", "forward_pre", "full_backward", "instance", "epilogue_step"]
)
def test_hooks_on_children_run(child: str, kind: str, device: torch.device) -> None:
    layer = pcf.nn.LinearScaleBatchNorm1d(
        7, 5, (5,), device=device, epilogue=(pcf.relu(), pcf.mul(2.0))
    )
    plain = copy.deepcopy(layer.to_torch())
    x = torch.randn(9, 7, device=device, requires_grad=True)
    module = layer.get_submodule(child)
    seen = []
    if kind == "instance":
        inner = module.forward
        module.forward = lambda value: seen.append(1) or inner(value)
    elif kind == "epilogue_step":
        layer.epilogue.get_submodule("0").register_forward_hook(lambda *_: seen.append(1))
    else:
        getattr(module, f"register_{kind}_hook")(lambda *_: seen.append(1))
    result = layer(x)
    result.sum().backward()
    assert seen == [1]
    torch.testing.assert_close(result, plain(x), **CLOSE)
    assert "hooks" in " ".join(pcf.counters()["fallback"])


def test_hooks_for_all_modules_run(device: torch.device) -> None:
    layer = pcf.nn.LinearScaleBatchNorm1d(7, 5, (5,), device=device)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    try:
        layer(torch.randn(9, 7, device=device))
    finally:
        handle.remove()
    assert {"Linear", "BatchNorm1d", "LinearScaleBatchNorm1d"} <= set(seen)


def test_parametrized_children(device: torch.device) -> None:
    layer = pcf.nn.LinearScaleBatchNorm1d(7, 5, (5,), device=device)
    nn.utils.parametrizations.weight_norm(layer.gemm)
    x = torch.randn(9, 7, device=device)
    torch.testing.assert_close(layer(x), copy.deepcopy(layer.to_torch())(x), **CLOSE)
    linear = nn.utils.parametrizations.weight_norm(pcf.nn.Linear(7, 5, device=device))
    expected = nn.functional.linear(x, linear.weight, linear.bias)
    torch.testing.assert_close(linear(x), expected, **CLOSE)
    linear(x).sum().backward()
    assert linear.parametrizations.weight.original0.grad is not None


def test_parameters_that_moved(device: torch.device) -> None:
    """As FSDP does: the weight is a plain tensor and no longer a parameter."""
    layer = pcf.nn.LinearScaleBatchNorm1d(7, 5, (5,), device=device)
    x = torch.randn(9, 7, device=device)
    expected = layer(x)
    weight = layer.gemm.weight.detach()
    del layer.gemm.weight
    layer.gemm.weight = weight
    torch.testing.assert_close(layer(x), expected, **CLOSE)


def test_other_norms(device: torch.device) -> None:
    class Doubling(nn.BatchNorm1d):
        def forward(self, value: Tensor) -> Tensor:
            return super().forward(value) * 2

    layer = pcf.nn.LinearScaleBatchNorm1d(7, 5, (5,), device=device)
    x = torch.randn(9, 7, device=device)
    once = layer(x)
    layer.bn = Doubling(5, device=device)
    torch.testing.assert_close(layer(x), once * 2, **CLOSE)


@pytest.mark.parametrize("steps", [(pcf.relu(),), (pcf.mul(torch.rand(5)), pcf.tanh())])
def test_epilogue_after_the_norm(steps, device: torch.device) -> None:
    layer = pcf.nn.LinearScaleBatchNorm1d(7, 5, (5,), epilogue=steps).to(device)
    same(layer, copy.deepcopy(layer.to_torch()), torch.randn(9, 7, device=device))


def test_functional_call_swaps_parameters(device: torch.device) -> None:
    layer = pcf.nn.LinearScaleBatchNorm1d(7, 5, (5,), device=device).eval()
    x = torch.randn(9, 7, device=device)
    other = {name: p.detach() * 2 for name, p in layer.named_parameters()}
    found = torch.func.functional_call(layer, other, (x,))
    expected = torch.func.functional_call(layer.to_torch(), other, (x,))
    torch.testing.assert_close(found, expected, **CLOSE)


def test_what_is_no_batch_norm_takes_one_sample() -> None:
    for other in (nn.Identity(), nn.Tanh()):
        layer, x = pcf.nn.LinearScaleBatchNorm1d(7, 5, (5,)), torch.rand(1, 7)
        layer.bn = other
        torch.testing.assert_close(layer(x), layer.to_torch()(x))
        conv, x = pcf.nn.Conv2dBatchNorm2dScale(3, 4, 3, 2.0), torch.rand(1, 3, 3, 3)
        conv.bn = other
        torch.testing.assert_close(conv(x), conv.to_torch()(x))


class Gathered(nn.SyncBatchNorm):
    """As if other processes had more values."""

    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(torch.cat([input, input + 1]), None, None, training=True)[:1]


def test_one_sample_is_left_to_a_norm_that_gathers_them() -> None:
    for layer, shape in (
        (pcf.nn.LinearScaleBatchNorm1d(7, 5, (5,)), (1, 7)),
        (pcf.nn.Conv2dBatchNorm2dScale(3, 5, 3, 2.0), (1, 3, 3, 3)),
    ):
        layer.bn, x = Gathered(5), torch.rand(shape)
        torch.testing.assert_close(layer(x), layer.to_torch()(x))
