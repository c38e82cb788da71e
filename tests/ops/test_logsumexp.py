"""logsumexp: torch's answers, errors, gradients and detours, and what crosses to the library."""

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import pycutfuse as pcf
from pycutfuse import _loader, config, support
from pycutfuse.ops import _logsumexp
from pycutfuse.testing import guarded

from ..cases.logsumexp import EMPTY, PLAIN, VIEWS, ReduceCase
from .simulated import hide_devices

CASES = PLAIN + VIEWS + EMPTY
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF, NAN = float("inf"), float("nan")


class Tagged(Tensor):
    """A subclass with torch's behaviour."""


def close(result: Tensor, x: Tensor, dims, keepdim: bool = False) -> None:
    """Fails unless `result` is logsumexp of x to the rounding of its dtype."""
    exact = torch.logsumexp(x.double(), dims, keepdim)
    assert result.shape == exact.shape
    assert result.is_contiguous()
    rounding = torch.finfo(result.dtype).eps
    torch.testing.assert_close(result.double(), exact, rtol=rounding, atol=8 * rounding)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_values(case: ReduceCase, keepdim: bool, device: torch.device) -> None:
    x = case.draw().to(device)
    close(pcf.ops.logsumexp(x, case.dims, keepdim), x, case.dims, keepdim)
    if len(case.dims) == 1:
        close(pcf.ops.logsumexp(x, dim=case.dims[0] - x.dim()), x, case.dims)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    result = pcf.ops.logsumexp(x, 1)
    assert result.dtype == dtype
    exact = torch.logsumexp(x.double(), 1)
    torch.testing.assert_close(result.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype: torch.dtype, device: torch.device) -> None:
    rows = [[INF, -INF], [INF, INF], [-INF, -INF], [NAN, INF], [NAN, -INF], [INF, 1], [-INF, 1]]
    rows += [[6e4, 6e4], [-6e4, -6e4], [6e4, -6e4]]
    x = torch.tensor(rows, dtype=dtype, device=device)
    for repeats in (1, 40, 700):
        wide = x.repeat(1, repeats)
        for tensor, dim in ((wide, 1), (wide.t().contiguous(), 0)):
            result = pcf.ops.logsumexp(tensor, dim)
            expected = torch.logsumexp(tensor.double(), dim).to(dtype)
            torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.parametrize("dim", [2, -3, 1.0, "a", None, True, (0, 0), [0, -2], (0, 1.0), (0, 2)])
def test_errors_as_torch(dim: Any, device: torch.device) -> None:
    x = torch.ones(3, 4, device=device)
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - the type is what is compared
        torch.logsumexp(x, dim)
    # Up to torch 2.12 these two name dimensions, which a tensor without names has not.
    expected = TypeError if dim in ("a", None) else type(theirs.value)
    with pytest.raises(expected, match="logsumexp: ") as ours:
        pcf.ops.logsumexp(x, dim)
    assert type(ours.value) is expected


def test_more_errors() -> None:
    with pytest.raises(TypeError, match="x is a list; it must be a Tensor"):
        pcf.ops.logsumexp([1.0], 0)
    with pytest.raises(TypeError, match="keepdim is a int; it must be a bool"):
        pcf.ops.logsumexp(torch.ones(2), 0, 1)
    with pytest.raises(IndexError, match="from -1 to 0"):
        pcf.ops.logsumexp(torch.tensor(1.0), 1)


@pytest.mark.parametrize("case", PLAIN + VIEWS, ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_gradients(case: ReduceCase, keepdim: bool, device: torch.device) -> None:
    x = case.draw().to(device).detach().requires_grad_()
    y = x.detach().requires_grad_()
    ours, theirs = pcf.ops.logsumexp(x, case.dims, keepdim), torch.logsumexp(y, case.dims, keepdim)
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2)).to(device)
    (one,) = torch.autograd.grad(ours, x, grad, create_graph=True)
    (other,) = torch.autograd.grad(theirs, y, grad, create_graph=True)
    torch.testing.assert_close(one, other)
    if x.numel() > 1:
        twice = [torch.autograd.grad(g.square().sum(), t)[0] for g, t in ((one, x), (other, y))]
        torch.testing.assert_close(*twice)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_special_values(dtype: torch.dtype, device: torch.device) -> None:
    rows = [[INF, -INF], [INF, INF], [-INF, -INF], [NAN, 1], [INF, 1], [-INF, 1]]
    x = torch.tensor(rows, dtype=dtype, device=device, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    pcf.ops.logsumexp(x, 1).sum().backward()
    torch.logsumexp(y, 1).sum().backward()
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad, y.grad, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.complex64])
def test_other_dtypes(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.ones(3, 4, device=device).to(dtype)
    expected = torch.logsumexp(x, 1)
    result = pcf.ops.logsumexp(x, 1)
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)
    assert f"logsumexp: dtype {dtype}".replace("torch.", "") in pcf.counters()["fallback"]


def test_float64_gradients() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: pcf.ops.logsumexp(x, (0,)), (x,))


def test_detours(device: torch.device) -> None:
    x = torch.randn(3, 4, device=device)
    expected = torch.logsumexp(x, 1)
    tagged = pcf.ops.logsumexp(x.as_subclass(Tagged), 1)
    assert type(tagged) is Tagged
    torch.testing.assert_close(tagged.as_subclass(Tensor), expected)
    mapped = torch.func.vmap(lambda row: pcf.ops.logsumexp(row, 0))(x)
    torch.testing.assert_close(mapped, expected)
    found = " ".join(pcf.counters()["fallback"])
    assert "Tagged" in found
    assert "torch.func" in found
    with pcf.precision("torch"):
        assert torch.equal(pcf.ops.logsumexp(x, 1), expected)
    assert pcf.counters()["handover"] == {'logsumexp: precision="torch"': 1}
    assert pcf.ops.logsumexp(x.to("meta"), 1).shape == (3,)


def test_the_error_policy() -> None:
    pcf.set_fallback_policy("error")
    with pytest.raises(pcf.FallbackError, match="cpu tensors"):
        pcf.ops.logsumexp(torch.ones(3), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_autocast_as_torch(dtype, requires_grad: bool, device: torch.device) -> None:
    x = torch.randn(3, 40, device=device, dtype=dtype, requires_grad=requires_grad)
    y = x.detach().clone().requires_grad_(requires_grad)
    with torch.autocast(device.type, torch.bfloat16):
        result, expected = pcf.ops.logsumexp(x, 1), torch.logsumexp(y, 1)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected)
    if requires_grad:
        result.sum().backward()
        expected.sum().backward()
        assert x.grad.dtype == dtype
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend: str, device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: pcf.ops.logsumexp(x * 2, (0, -1)).square(),
        fullgraph=True,
        dynamic=True,
        backend=backend,
    )
    for rows in (3, 7, 12):
        x = torch.randn(rows, 5, 6, device=device, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        result, expected = compiled(x), torch.logsumexp(y * 2, (0, -1)).square()
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
        result.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("dims", "wide"), [((1,), False), ((0, 2), True), ((0, 1, 2), False)])
def test_opcheck(dims, keepdim: bool, wide: bool, device: torch.device) -> None:
    x = torch.randn(3, 4, 5, device=device)
    torch.library.opcheck(torch.ops.pycutfuse.logsumexp.default, (x, dims, keepdim, wide))


def test_explain(device: torch.device) -> None:
    x = torch.randn(3, 4, device=device)
    found = pcf.explain(pcf.ops.logsumexp, x, -1)
    assert found.path == ("fused" if x.is_cuda else "fallback"), str(found)
    assert found.program == "logsumexp(dim=(1,))"
    assert pcf.explain(pcf.ops.logsumexp, x.double(), 1).reason == "dtype float64"
    with pytest.raises(IndexError):
        pcf.explain(pcf.ops.logsumexp, x, 2)


class Binding:
    """Reads and writes host memory through the addresses that the library would get."""

    def __init__(self) -> None:
        self.planned = self.launched = 0

    def plan_logsumexp(self, sizes, strides, reduced, dtype, out_dtype, device) -> Any:
        self.planned += 1
        dims = [d for d in range(len(sizes)) if reduced >> d & 1]
        if len(sizes) > 5:
            raise NotImplementedError("6 kept dimensions that do not lie together")
        return SimpleNamespace(
            sizes=sizes, strides=strides, dims=dims, dtype=dtype, out=out_dtype, workspace_bytes=24
        )

    def logsumexp(self, plan: Any, x: int, out: int, workspace: int, stream: int) -> None:
        self.launched += 1
        assert stream == 77
        ctypes.memset(workspace, 1, plan.workspace_bytes)
        dtypes = list(_logsumexp.CODES)
        span = sum((n - 1) * s for n, s in zip(plan.sizes, plan.strides, strict=True)) + 1
        read = self._memory(x, span, dtypes[plan.dtype]).as_strided(plan.sizes, plan.strides)
        result = torch.logsumexp(read.float(), plan.dims).to(dtypes[plan.out])
        self._memory(out, result.numel(), result.dtype).copy_(result.flatten())

    @staticmethod
    def _memory(address: int, count: int, dtype: torch.dtype) -> Tensor:
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype)


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Binding]:
    made = Binding()
    monkeypatch.setattr(_logsumexp, "native", lambda: _loader.Native(made, None))
    monkeypatch.setattr(support, "device_problem", lambda index: None)
    monkeypatch.setattr(support, "device_props", lambda index: SimpleNamespace(index=index))
    monkeypatch.setattr(_logsumexp, "raw_stream", lambda index: 77)
    hide_devices(monkeypatch)
    _logsumexp.clear_cache()
    yield made
    _logsumexp.clear_cache()


@pytest.mark.parametrize("case", PLAIN + VIEWS, ids=str)
@pytest.mark.parametrize(("dtype", "wide"), [(torch.float32, False), (torch.float16, True)])
def test_addresses(case: ReduceCase, dtype: torch.dtype, wide: bool, binding: Binding) -> None:
    x = case.draw(dtype=dtype)
    for keepdim in (False, True):
        for _ in range(2):
            with guarded():
                result = _logsumexp._forward_cuda(x, list(case.dims), keepdim, wide)
            assert result.dtype == torch.float32
            close(result, x, case.dims, keepdim)
    assert (binding.planned, binding.launched) == (2, 4)


def test_what_no_kernel_takes_is_handed_over(binding: Binding) -> None:
    x = torch.randn(2, 2, 2, 2, 2, 2)
    for _ in range(2):
        close(_logsumexp._forward_cuda(x, [0, 2], False, False), x, (0, 2))
    reason = "logsumexp: 6 kept dimensions that do not lie together"
    assert config.counters() == {"fallback": {}, "handover": {reason: 2}}
    assert (binding.planned, binding.launched) == (1, 0)


def test_the_cache_stays_bounded(binding: Binding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_logsumexp, "MAX_RECIPES", 4)
    for rows in range(1, 20):
        x = torch.randn(rows, 3)
        close(_logsumexp._forward_cuda(x, [1], False, False), x, 1)
    assert len(_logsumexp._recipes) <= 4
