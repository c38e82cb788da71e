"""torch.compile: whole graphs, dynamic sizes, gradients, settings that are read inside."""

import copy
import inspect
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing

import pycutfuse as pcf
from pycutfuse import config
from pycutfuse.ops import _chain_launch, _conv_call, _linear_batch_norm_raw

BACKENDS = ["aot_eager", "inductor"]
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def modules(device: torch.device) -> dict[str, torch.nn.Module]:
    scale = torch.nn.Parameter(torch.rand(6, device=device))
    steps = (pcf.mul(scale), pcf.gelu(), pcf.add(2.0), pcf.silu())
    after = (pcf.mul(2.0), pcf.relu())
    return {
        "linear": pcf.nn.Linear(8, 6, device=device),
        "program": pcf.nn.Linear(8, 6, device=device, epilogue=steps),
        "norm": pcf.nn.LinearScaleBatchNorm1d(8, 6, (6,), device=device),
        "norm_after": pcf.nn.LinearScaleBatchNorm1d(
            8, 6, (6,), momentum=None, device=device, epilogue=after
        ),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["linear", "program", "norm", "norm_after"])
@pytest.mark.parametrize("training", [True, False])
def test_fullgraph_and_dynamic(
    backend: str, name: str, training: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    module = modules(device)[name].train(training)
    twin = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for rows in (16, 19, 5):
        x = torch.randn(rows, 8, device=device, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        one, other = compiled(x), twin(y)
        torch.testing.assert_close(one, other, **CLOSE)
        one.square().sum().backward()
        other.square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, **CLOSE)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), twin(x), **CLOSE)
    for one, other in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **CLOSE)
    for one, other in zip(module.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_varying_sizes_compile_once(device: torch.device) -> None:
    counter = torch._dynamo.testing.CompileCounter()
    module = pcf.nn.LinearScaleBatchNorm1d(8, 6, (6,), device=device)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for rows in (16, 19, 5):
            compiled(torch.randn(rows, 8, device=device))
    assert counter.frame_count == 1


def test_steps_made_inside_a_graph(device: torch.device) -> None:
    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return pcf.ops.linear(
            x, weight, epilogue=(pcf.relu(), pcf.clamp(max=3.0), pcf.mul(x[:, :1]))
        )

    x, weight = torch.randn(4, 8, device=device), torch.randn(6, 8, device=device)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight), call(x, weight))


def test_the_thread_precision_is_read_at_each_call(device: torch.device) -> None:
    seen: list[str] = []
    resolve = config.resolve_tier
    x, weight = torch.randn(4, 8, device=device), torch.randn(6, 8, device=device)
    compiled = torch.compile(
        lambda x, weight: pcf.ops.linear(x, weight), fullgraph=True, backend=_record(seen)
    )
    compiled(x, weight)
    for value in ("ieee", "torch"):
        with pcf.precision(value):
            compiled(x, weight)
    compiled(x, weight)
    assert seen == ["default", "ieee", "torch", "default"]
    assert resolve is config.resolve_tier


def _record(seen: list[str]):
    """A backend that notes the precision which each run hands to the operator."""

    def backend(graph: torch.fx.GraphModule, _: object):
        node = next(n for n in graph.graph.nodes if "linear_fused" in str(n.target))

        def run(*arguments: object) -> object:
            seen.append(str(node.args[-1]))
            return graph(*arguments)

        return run

    return backend


def test_a_precision_context_inside_a_graph(device: torch.device) -> None:
    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with pcf.precision("torch"):
            return pcf.ops.linear(x, weight)

    seen: list[str] = []
    x, weight = torch.randn(4, 8, device=device), torch.randn(6, 8, device=device)
    torch.compile(call, fullgraph=True, backend=_record(seen))(x, weight)
    assert seen == ["torch"]
    assert config.current_precision() == "default"


def test_autocast_of_the_cpu_and_float64_compile_to_the_plain_chain() -> None:
    module = pcf.nn.Linear(8, 6, epilogue=(pcf.relu(),))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x).dtype == torch.bfloat16
    wide = copy.deepcopy(module).double()
    compiled = torch.compile(wide, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x.double()), wide(x.double()))
    assert {"linear: autocast is enabled", "linear: dtype float64"} <= set(
        pcf.counters()["fallback"]
    )


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_16_bit_modules(dtype: torch.dtype, training: bool, cuda, fused: None) -> None:
    module = pcf.nn.LinearScaleBatchNorm1d(64, 48, (48,), device=cuda, dtype=dtype)
    twin = copy.deepcopy(module.train(training))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, grad = torch.randn(2, 32, 64, device=cuda, dtype=dtype).unbind(0)
    for _ in range(2):
        results = [one(x) for one in (compiled, twin)]
        assert torch.equal(*results)
        grads = [
            torch.autograd.grad(out, list(one.parameters()), grad[:, :48])
            for out, one in zip(results, (module, twin), strict=True)
        ]
        assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_a_fallback_error_stops_the_compilation(device: torch.device) -> None:
    pcf.set_fallback_policy("error")
    module = pcf.nn.Linear(8, 6, device=device).double()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="fallback policy is 'error'"):
        compiled(torch.randn(4, 8, device=device).double())


def test_export(device: torch.device) -> None:
    module = pcf.nn.LinearScaleBatchNorm1d(8, 6, (6,), device=device).eval()
    x = torch.randn(4, 8, device=device)
    for strict in (True, False):
        exported = torch.export.export(module, (x,), strict=strict)
        assert "pycutfuse.linear_batch_norm" in str(exported)
        torch.testing.assert_close(exported.module()(x), module(x))


PACKAGED = {
    "linear": (lambda: pcf.nn.Linear(6, 4, bias=False), (3, 6)),
    "convolution": (lambda: pcf.nn.Conv2dBatchNorm2dScale(3, 4, 3, 2.0), (2, 3, 8, 8)),
}


@pytest.mark.parametrize("name", PACKAGED)
def test_packages_of_aotinductor(name: str, tmp_path: Path) -> None:
    """They give None for an empty list."""
    make, shape = PACKAGED[name]
    module, x = make().eval(), torch.rand(shape)
    with torch.no_grad():
        exported = torch.export.export(module, (x,))
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "module.pt2")
        )
        result = torch._inductor.aoti_load_package(path)(x)
        torch.testing.assert_close(result, module(x))


@pytest.mark.parametrize(
    "kind",
    [
        _chain_launch.Call,
        _chain_launch.Layer,
        _conv_call.Call,
        _conv_call.Norm,
        _linear_batch_norm_raw.Call,
    ],
    ids=lambda kind: f"{kind.__module__}.{kind.__name__}",
)
def test_calls_have_fields_only(kind) -> None:
    """A graph of torch 2.10 breaks at a property of a named tuple."""
    own = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
    assert not [n for n, v in own.items() if isinstance(v, property) or inspect.isfunction(v)]
