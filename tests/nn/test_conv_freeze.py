"""Frozen convolutions: packed once for each size, and blind to changes until unfrozen."""

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import pycutfuse as pcf
from pycutfuse.ops import _conv_batch_norm_raw, _conv_packed, _conv_raw, _gate, _launch
from pycutfuse.testing import generate

from ..ops.simulated_conv import ConvBinding, install

KINDS = ("conv", "transposed", "norm")


def make(kind: str, device: torch.device | str = "cpu", **options) -> nn.Module:
    torch.manual_seed(1)
    options = {"device": device, "precision": "ieee"} | options
    if kind == "norm":
        return pcf.nn.Conv2dBatchNorm2dScale(8, 16, 3, 2.0, **options).eval()
    build = pcf.nn.Conv2d if kind == "conv" else pcf.nn.ConvTranspose2d
    return build(8, 16, 3, epilogue=(pcf.relu(),), **options).eval()


def weight_of(layer: nn.Module) -> nn.Parameter:
    return layer.conv.weight if hasattr(layer, "conv") else layer.weight


def batch(size: int = 24, device: torch.device | str = "cpu") -> Tensor:
    return generate("randn", (2, 8, size, 25), seed=3, device=device)


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConvBinding]:
    """Host tensors take the road of CUDA tensors, frozen ones too."""
    monkeypatch.setattr(_gate, "_ON_CPU", _gate._DTYPES)
    for raw in (_conv_raw, _conv_batch_norm_raw):
        monkeypatch.setattr(raw, "forward", raw._forward_cuda)
    monkeypatch.setattr(_conv_packed, "why_not_frozen", lambda weight: None)
    monkeypatch.setattr(_conv_packed, "raw_stream", lambda index: 77)
    monkeypatch.setattr(
        _conv_packed, "_written", lambda memory, _, at: _conv_packed._Written(memory, at, None)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield install(monkeypatch)
    _launch.clear_caches()


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_is_packed_once_for_each_form(kind: str, binding: ConvBinding) -> None:
    layer = make(kind)
    with torch.no_grad():
        expected = [layer(batch(size)) for size in (24, 25, 26)]
        keys = list(layer.state_dict())
        assert pcf.freeze(layer).frozen
        assert list(layer.state_dict()) == keys
        for _ in range(2):
            for size, result in zip((24, 25, 26), expected, strict=True):
                torch.testing.assert_close(layer(batch(size)), result)
                assert binding.last["packed"] != 0
    assert binding.packed == 2  # the simulated form depends on the parity of the height
    with pcf.precision(None):
        layer.precision = "tf32"
        layer(batch())
    assert binding.packed == 3


@pytest.mark.parametrize("kind", KINDS)
def test_changes_are_not_seen_until_it_is_frozen_anew(kind: str, binding: ConvBinding) -> None:
    layer = pcf.freeze(make(kind))
    with torch.no_grad():
        fresh = make(kind)(batch(25))
        before = layer(batch())
        weight_of(layer).mul_(2)
        torch.testing.assert_close(layer(batch()), before)
        torch.testing.assert_close(layer(batch(25)), fresh)  # packed now, from the snapshot
        expected = layer.to_torch()(batch())
        torch.testing.assert_close(pcf.freeze(layer)(batch()), expected)
        pcf.unfreeze(layer)
        torch.testing.assert_close(layer(batch()), expected)
        assert binding.last["packed"] == 0


def test_nothing_is_packed_under_capture(monkeypatch, binding: ConvBinding) -> None:
    layer = pcf.freeze(make("conv"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with torch.no_grad():
        result = layer(batch())
        torch.testing.assert_close(result, layer.to_torch()(batch()))
        assert (binding.packed, binding.last["packed"]) == (0, 0)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        layer(batch())
        assert binding.packed == 1
        assert binding.last["packed"] != 0


def test_a_matrix_product_of_pixels_stays_one_under_capture(monkeypatch, binding) -> None:
    layer = pcf.freeze(pcf.nn.Conv2d(8, 6, 1, epilogue=(pcf.relu(),), precision="ieee").eval())
    x = batch().contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for capturing in (True, False):
            monkeypatch.setattr(
                torch.cuda, "is_current_stream_capturing", lambda found=capturing: found
            )
            torch.testing.assert_close(layer(x), layer.to_torch()(x))
            assert (binding.last["packed"] == 0) == capturing
            assert binding.last["problem"].pixel_stride == 8


def test_forms_are_few(monkeypatch, binding: ConvBinding) -> None:
    monkeypatch.setattr(_conv_packed, "MAX_FORMS", 1)
    layer = pcf.freeze(make("conv"))
    with torch.no_grad():
        for size in (24, 25, 24, 25):
            torch.testing.assert_close(layer(batch(size)), layer.to_torch()(batch(size)))
            assert (binding.last["packed"] == 0) == (size == 25)
    assert binding.packed == 1


def test_forms_die_with_the_module(binding: ConvBinding) -> None:
    layer = pcf.freeze(make("conv"))
    before = len(_conv_packed._by_address)
    del layer
    gc.collect()
    assert len(_conv_packed._by_address) == before - 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_form_outlives_its_launch(kind: str, monkeypatch, binding: ConvBinding) -> None:
    """Another thread may unfreeze the module in between."""
    layer, alive = pcf.freeze(make(kind)), []

    def run(*given: object) -> None:
        form = weakref.ref(next(iter(layer._forms.forms.values())).memory)
        pcf.unfreeze(layer)
        alive.append(form() is not None)

    with torch.no_grad():
        layer(batch())
        monkeypatch.setattr(binding, "run_conv", run)
        _launch.clear_caches()
        layer(batch())
    assert alive == [True]


def test_gradients_flow_through_a_frozen_module(binding: ConvBinding) -> None:
    layer, x = make("norm"), batch().requires_grad_()
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    (found,) = torch.autograd.grad(pcf.freeze(layer)(x).sum(), x)
    torch.testing.assert_close(found, expected)


DROPS = {
    "unfreeze": pcf.unfreeze,
    "train": lambda m: m.train().eval(),
    "load": lambda m: m.load_state_dict(copy.deepcopy(m.state_dict())),
    "to": lambda m: m.to("cpu"),
    "double": lambda m: m.double().float(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drop", DROPS)
def test_what_unfreezes(kind: str, drop: str, binding: ConvBinding) -> None:
    layer = pcf.freeze(make(kind))
    DROPS[drop](layer)
    assert not layer.frozen


def test_a_new_parameter_unfreezes_and_another_shape_is_refused(binding: ConvBinding) -> None:
    layer = pcf.freeze(make("conv"))
    layer.weight = nn.Parameter(torch.zeros_like(layer.weight))
    assert not layer.frozen
    pcf.freeze(layer)
    layer.weight.data = torch.zeros(16, 8, 2, 2)
    with pytest.raises(RuntimeError, match="unfreeze"):
        layer(batch())


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_not_frozen(how, binding: ConvBinding) -> None:
    layer = pcf.freeze(make("conv"))
    made = how(layer)
    assert layer.frozen
    assert not made.frozen


def test_training_mode_is_refused_and_the_cpu_left_alone() -> None:
    for kind in KINDS:
        layer = make(kind)
        with pytest.raises(RuntimeError, match="training mode"):
            pcf.freeze(layer.train())
        assert not pcf.freeze(layer.eval()).frozen
    assert pcf.counters()["fallback"]["freeze: cpu tensors"] == 3


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_the_result_is_the_same_on_the_gpu(kind: str, cuda: torch.device, fused: None) -> None:
    layer = make(kind, cuda)
    with torch.no_grad():
        for size in (34, 35, 64):
            pcf.unfreeze(layer)
            before = layer(batch(size, cuda))
            pcf.freeze(layer)
            assert torch.equal(layer(batch(size, cuda)), before)
            assert torch.equal(layer(batch(size, cuda)), before)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_frozen_modules(kind: str, cuda: torch.device, fused: None) -> None:
    layer, x = pcf.freeze(make(kind, cuda)), batch(40, cuda)
    for warm in (False, True):
        with torch.no_grad():
            expected = make(kind, cuda)(x)
            if warm:
                layer(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = layer(x)
        graph.replay()
        assert torch.equal(result, expected)


@pytest.mark.cuda
def test_forms_are_ordered_for_other_streams(cuda: torch.device, fused: None) -> None:
    layer, x, side = make("conv", cuda), batch(40, cuda), torch.cuda.Stream()
    with torch.no_grad():
        layer.weight.mul_(3)
        expected = layer(x)
        layer.weight.div_(3)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # the snapshot and the form queue behind this
        layer.weight.mul_(3)
        pcf.freeze(layer)
        layer(x)
        with torch.cuda.stream(side):
            result = layer(x)
    side.synchronize()
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
def test_a_compiled_frozen_module(cuda: torch.device) -> None:
    torch._dynamo.reset()
    layer, x = make("conv", cuda), batch(40, cuda)
    with torch.no_grad():
        expected = layer(x)
        compiled = torch.compile(pcf.freeze(layer), fullgraph=True)
        assert torch.equal(compiled(x), expected)
        pcf.unfreeze(layer)
        assert torch.equal(compiled(x), expected)
