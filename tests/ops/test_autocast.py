"""torch.autocast on CUDA, simulated on the host: which dtypes run, and torch's result dtypes."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pycutfuse as pcf
from pycutfuse import config
from pycutfuse.ops import _gate, _launch, _linear
from pycutfuse.ops import _linear_batch_norm_raw as raw
from pycutfuse.reference.program import FUNCTIONS

from .simulated import Binding, install

DTYPES = (torch.float16, torch.bfloat16)


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Autocast of CUDA to this dtype; the context manager itself refuses without a GPU."""
    torch.set_autocast_dtype("cuda", request.param)
    torch.set_autocast_enabled("cuda", True)
    yield request.param
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", torch.float16)


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Binding]:
    """Host tensors take the road of CUDA tensors."""
    monkeypatch.setattr(_gate, "autocasts", lambda x: torch.is_autocast_enabled("cuda"))
    monkeypatch.setattr(_gate, "_ON_CPU", _gate._DTYPES)
    monkeypatch.setattr(_linear, "_forward_op", _linear._forward_cuda)
    monkeypatch.setattr(raw, "forward", raw._forward_cuda)
    yield install(monkeypatch)
    _launch.clear_caches()


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def test_only_softplus_is_widened() -> None:
    """What `_gate.why_not_autocast` says of torch's list, read from torch."""
    names = {"gelu_erf": "gelu", "gelu_tanh": "gelu", "minimum": "clamp", "maximum": "clamp"}
    norms = ("batch_norm", "_batch_norm_impl_index", "native_batch_norm")

    def listed(name: str) -> bool:
        overloads = [f"aten::{name}", f"aten::{name}.Tensor"]
        found = [one for one in overloads if torch._C._dispatch_has_kernel(one)]
        assert found, name
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        return any(has(one, "AutocastCUDA") for one in found)

    assert {name for name in FUNCTIONS if listed(names.get(name, name))} == {"softplus"}
    assert not any(map(listed, norms))
    assert listed("linear")


@pytest.mark.parametrize("grad", [False, True])
def test_linear_runs_in_the_autocast_dtype(dtype, grad: bool, binding: Binding) -> None:
    layer, x = pcf.nn.Linear(8, 4, epilogue=(pcf.gelu(), pcf.mul(2.0))), leaf(5, 8)
    twins = [t.detach().clone().requires_grad_() for t in (x, layer.weight, layer.bias)]
    for _ in range(3):
        with torch.set_grad_enabled(grad):
            result = layer(x)
    wanted = F.gelu(F.linear(*(t.to(dtype) for t in twins))) * 2.0
    assert binding.launched == 3
    assert result.dtype is dtype
    tolerance = {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(result, wanted, **tolerance)
    assert torch.is_autocast_enabled("cuda")
    if grad:
        result.sum().backward()
        wanted.sum().backward()
        for one, twin in zip((x, layer.weight, layer.bias), twins, strict=True):
            assert one.grad.dtype is torch.float32
            torch.testing.assert_close(one.grad, twin.grad, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("step", [pcf.mul(torch.full((4,), 2.0)), pcf.softplus()])
def test_what_autocast_widens_is_torchs(step, dtype, binding: Binding) -> None:
    x, weight = leaf(5, 8), leaf(4, 8)
    result = pcf.ops.linear(x, weight, epilogue=(step,))
    assert binding.launched == 0
    assert sum(config.counters()["fallback"].values()) == 1
    if step.op == "mul":
        assert result.dtype is torch.float32
    found = pcf.explain(pcf.ops.linear, x, weight, epilogue=(step,))
    assert found.path == "fallback"
    assert "float32" in found.reason


def test_a_scale_of_float32_promotes(dtype, binding: Binding) -> None:
    layer = pcf.nn.LinearScaleBatchNorm1d(8, 4, (4,))
    result = layer(leaf(16, 8))
    assert result.dtype is torch.float32
    assert binding.launched == 0
    assert int(layer.bn.num_batches_tracked) == 1
    assert pcf.explain(layer, leaf(16, 8)).path == "fallback"


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_keeps_float32_parameters(training: bool, dtype, binding: Binding) -> None:
    x, linear, norm = leaf(16, 8), nn.Linear(8, 4), nn.BatchNorm1d(4).train(training)
    stats = {"running_mean": norm.running_mean, "running_var": norm.running_var}
    result = pcf.ops.linear_batch_norm(
        *(x, linear.weight, linear.bias),
        **stats,
        num_batches_tracked=norm.num_batches_tracked,
        bn_weight=norm.weight,
        bn_bias=norm.bias,
        training=training,
        after=(pcf.relu(),),
    )
    assert (result.dtype, binding.launched) == (dtype, 1)
    assert int(norm.num_batches_tracked) == training
    result.sum().backward()
    for tensor in (x, linear.weight, linear.bias, norm.weight, norm.bias):
        assert tensor.grad.dtype is torch.float32


def test_planes_of_float32_are_left_out(dtype, binding: Binding) -> None:
    layer = pcf.nn.Linear(8, 4).eval()
    layer.planes, layer.words = torch.zeros(128, dtype=torch.uint8), torch.zeros(4).int()
    layer._frozen_of = layer.frozen_weight(), None
    with torch.no_grad():
        layer(leaf(5, 8))
    assert binding.last["planes"] == (0, 0)


def test_float64_mixes_as_in_torch(dtype, binding: Binding) -> None:
    with pytest.raises(RuntimeError, match="float64"):
        pcf.ops.linear(leaf(5, 8).double(), leaf(4, 8))


def test_explain_casts_nothing(dtype, binding: Binding) -> None:
    found = pcf.explain(pcf.nn.Linear(8, 4), leaf(5, 8))
    assert (found.path, found.tier) == ("fused", str(dtype).replace("torch.", ""))


@pytest.mark.parametrize("steps", [(pcf.gelu(),), (pcf.softplus(),)], ids=["cast", "plain"])
def test_a_graph_casts_as_eager(steps, dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gate, "autocasts", lambda x: torch.is_autocast_enabled("cuda"))
    monkeypatch.setattr(_gate, "_ON_CPU", _gate._DTYPES)
    layer = pcf.nn.Linear(8, 4, epilogue=steps)
    seen = []

    def backend(graph: torch.fx.GraphModule, _: object):
        nodes = [node for node in graph.graph.nodes if "linear_fused" in str(node.target)]
        seen.extend(nodes)
        return graph

    with torch.no_grad():
        result = torch.compile(layer, fullgraph=True, backend=backend)(leaf(5, 8))
    assert len(seen) == (steps[0].op != "softplus")
    if seen:
        assert result.dtype is dtype
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(leaf(5, 8)).sum().backward()
    assert layer.weight.grad.dtype is torch.float32


CHAINS = {
    "bare": lambda: pcf.nn.Linear(64, 48),
    "pointwise": lambda: pcf.nn.Linear(
        64, 48, epilogue=(pcf.gelu(), pcf.mul(0.5), pcf.mul(nn.Parameter(torch.tensor(2.0))))
    ),
    "promoting": lambda: pcf.nn.Linear(64, 48, epilogue=(pcf.mul(nn.Parameter(torch.ones(48))),)),
    "softplus": lambda: pcf.nn.Linear(64, 48, epilogue=(pcf.softplus(),)),
    "norm": lambda: pcf.nn.LinearScaleBatchNorm1d(64, 48, (48,)),
    "norm of a number": lambda: pcf.nn.LinearScaleBatchNorm1d(64, 48, (), epilogue=(pcf.relu(),)),
}


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("compiled", [False, True])
def test_dtypes_and_gradients_are_torchs(name: str, dtype, compiled: bool, cuda) -> None:
    """Errors against float64, as a relu switches elements where either one has rounded to 0."""
    torch.compiler.reset()  # other tests compile the same forwards, and there is a limit to that
    torch.manual_seed(0)
    layer = CHAINS[name]().to(cuda)
    chain = layer.to_torch()
    wide = copy.deepcopy(chain).double()
    ours = torch.compile(layer, fullgraph=True) if compiled else layer
    x, grad = torch.randn(32, 64, device=cuda), torch.randn(32, 48, device=cuda)
    results = []
    for module in (ours, chain):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cuda", dtype):
            out = module(leaf)
        given = (leaf, *layer.parameters())
        results.append((out, *torch.autograd.grad(out, given, grad.to(out.dtype))))
    leaf = x.double().requires_grad_()
    out = wide(leaf)
    upstream = grad.to(results[0][0].dtype).double()
    exact = (out, *torch.autograd.grad(out, (leaf, *wide.parameters()), upstream))
    with torch.no_grad():
        rounding = torch.finfo(dtype).eps * max(float(value.abs().max()) for value in exact)
        for one, other, value in zip(*results, exact, strict=True):
            assert one.dtype is other.dtype
            theirs = float((other - value).abs().max())
            assert float((one - value).abs().max()) <= max(2 * theirs, rounding)
    fused = name in ("bare", "pointwise", "norm of a number")
    assert (sum(pcf.counters()["fallback"].values()) == 0) == fused
