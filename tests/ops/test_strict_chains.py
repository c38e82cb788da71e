"""An explicit "ieee" holds where the plain chain or a module's children run under flags that allow
TF32; of children of another type, whose contractions are not known, it is refused in words.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pycutfuse as pcf
from pycutfuse import config
from pycutfuse.ops import _launch
from pycutfuse.ops._conv_call import by_chain
from pycutfuse.ops._linear import forward_by_torch


class Products(TorchDispatchMode):
    """The dtypes of the contractions that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func.overloadpacket) in ("aten.addmm", "aten.mm", "aten.convolution"):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


class OnGpu(Tensor):
    """A host tensor that says it is a GPU's. No kernel takes a subclass."""

    is_cuda = True  # type: ignore[assignment]


@pytest.fixture
def contracted(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Flags of torch that allow TF32, and the dtypes that its contractions see."""
    for name in ("torch_tier", "torch_conv_tier"):
        monkeypatch.setattr(config, name, lambda: "tf32")
    seen: list[torch.dtype] = []
    for name in ("linear", "conv2d", "conv_transpose2d"):
        original = getattr(F, name)

        def noted(input: Tensor, *rest: Any, _original: Any = original, **named: Any) -> Tensor:
            seen.append(input.dtype)
            return _original(input, *rest, **named)

        monkeypatch.setattr(F, name, noted)
    return seen


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).as_subclass(OnGpu)


MODULES: dict[str, Callable[[Any], nn.Module]] = {
    "linear": lambda p: pcf.nn.Linear(6, 6, epilogue=(pcf.relu(),), precision=p),
    "logsumexp": lambda p: pcf.nn.LinearLogSumExp(6, 6, epilogue=(pcf.relu(),), precision=p),
    "norm": lambda p: pcf.nn.LinearScaleBatchNorm1d(6, 6, (6,), precision=p).eval(),
    "two linears": lambda p: pcf.nn.LinearSigmoidLinearLogSumExp(6, 6, 6, precision=p),
    "conv": lambda p: pcf.nn.Conv2d(6, 6, 2, epilogue=(pcf.relu(),), precision=p),
    "transposed": lambda p: pcf.nn.ConvTranspose2d(6, 6, 2, epilogue=(pcf.relu(),), precision=p),
    "conv norm": lambda p: pcf.nn.Conv2dBatchNorm2dScale(6, 6, 2, 2.0, precision=p).eval(),
}


def input_of(name: str) -> Tensor:
    return draw(2, 6, 5, 5) if "conv" in name or name == "transposed" else draw(4, 6)


@pytest.mark.parametrize("precision", ["ieee", None])
@pytest.mark.parametrize("name", MODULES)
def test_the_chain_of_an_operator(name: str, precision: Any, contracted: list) -> None:
    layer, x = MODULES[name](precision), input_of(name)
    expected = layer.to_torch()(x)
    contracted.clear()
    result = layer(x)
    assert set(contracted) == {torch.float64 if precision else torch.float32}
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    assert pcf.explain(layer, x).tier == (precision or "tf32")


def first_child(layer: nn.Module) -> nn.Module:
    return next(layer.epilogue.children() if layer.epilogue else layer.children())


def without_steps(name: str) -> nn.Module:
    layer = MODULES[name]("ieee")
    if not hasattr(layer, "epilogue"):
        layer.epilogue = ()
    return layer


@pytest.mark.parametrize("name", MODULES)
def test_children_run_at_ieee(name: str, contracted: list) -> None:
    layer, x = without_steps(name), input_of(name)
    expected = layer.to_torch()(x)
    first_child(layer).register_forward_hook(lambda *_: None)
    with Products() as products:
        result = layer(x)
    assert set(products.dtypes) == {torch.float64}
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    found = pcf.explain(layer, x)
    assert (found.path, found.tier) == ("fallback", "ieee")
    assert pcf.counters()["fallback"] == {f"{found.operator}: {found.reason}": 1}
    assert "hooks" in found.reason
    layer.precision = "tf32"
    with Products() as products:
        layer(x)
    assert set(products.dtypes) == {torch.float32}
    assert pcf.explain(layer, x).tier == "tf32"


def test_a_scale_that_no_kernel_takes(contracted: list) -> None:
    layer = pcf.nn.Conv2dBatchNorm2dScale(6, 6, 2, torch.rand(1, 1, 4, 4), precision="ieee").eval()
    with Products() as products:
        result = layer(input_of("conv norm"))
    assert products.dtypes == [torch.float64]
    wide = layer.to_torch().double()(input_of("conv norm").double())
    torch.testing.assert_close(result, wide.float())


class Named(nn.Module):
    """A step that gives its arguments by name, and one that is not of float32."""

    def forward(self, x: Tensor) -> Tensor:
        half = F.linear(input=x.half(), weight=torch.eye(6).half())
        return F.linear(input=x, weight=torch.eye(6)) + half


def test_a_step_of_the_users(contracted: list) -> None:
    layer, x = MODULES["linear"]("ieee"), draw(4, 6)
    ((name, _),) = layer.epilogue.named_children()
    setattr(layer.epilogue, name, Named())
    with Products() as products:
        result = layer(x)
    assert products.dtypes == [torch.float64, torch.float16, torch.float64]
    assert result.dtype is torch.float32


class Another(nn.Linear):
    pass


class AnotherConv(nn.Conv2d):
    pass


@pytest.mark.parametrize("name", ["norm", "two linears", "conv norm"])
def test_children_of_another_type_run_at_torchs_tier_and_it_is_said(
    name: str, contracted: list
) -> None:
    layer, x = MODULES[name]("ieee"), input_of(name)
    child = next(layer.children())
    child.__class__ = AnotherConv if name == "conv norm" else Another
    layer(x)
    assert set(contracted) == {torch.float32}
    (reason,) = pcf.counters()["fallback"]
    found = pcf.explain(layer, x)
    assert (found.path, found.tier) == ("fallback", "tf32")
    assert reason == f"{found.operator}: {found.reason}"
    assert "not at ieee" in reason
    layer.precision = "tf32"
    assert "ieee" not in pcf.explain(layer, x).reason
    layer.precision = "ieee"
    assert "ieee" not in pcf.explain(layer, x.as_subclass(Tensor)).reason


def test_what_is_handed_over(contracted: list) -> None:
    x, weight = draw(4, 6), draw(3, 6)
    forward_by_torch(x, weight, (), (), (), "ieee")
    call = pcf.ops._conv.prepare_conv2d(draw(2, 6, 5, 5), draw(3, 6, 2, 2), precision="ieee")
    by_chain(call)
    assert contracted == [torch.float64] * 2
    assert _launch.cached((x, weight, None), pcf.program.encode(()), "ieee") is None


def test_a_compiled_chain_reads_the_flags_when_it_is_traced() -> None:
    compiled = torch.compile(lambda: config.torch_tier(), fullgraph=True, backend="eager")
    assert compiled() == config.torch_tier()
