"""float16 and bfloat16 tensors: their layout, which dtypes mix, and which calls torch runs."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse import config, support
from pycutfuse.ops import _gate, _launch, _layout
from pycutfuse.ops import _linear as linear_module
from pycutfuse.ops import _linear_batch_norm_raw as raw
from pycutfuse.program import EMPTY, encode, operands_of
from pycutfuse.testing import LAYOUTS, forced_policy, guarded, strided

from .simulated import Binding, install

NARROW = (torch.float16, torch.bfloat16)
NONE = (None,) * 5


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Binding]:
    monkeypatch.setattr(_gate, "_ON_CPU", _gate._DTYPES)
    yield install(monkeypatch)
    _launch.clear_caches()


def call(x: Tensor, weight: Tensor, program=(), precision: str = "ieee") -> Tensor:
    encoded = encode(program)
    head = (x, weight, None, None, list(encoded.codes), list(encoded.constants))
    return linear_module._forward_cuda(*head, operands_of(program), precision)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(5, 16, 8), (5, 7, 3), (1, 24, 4), (6, 1, 2), (1, 1, 1)], ids=str)
def test_layouts(dtype: torch.dtype, layout: str, size, binding: Binding) -> None:
    m, k, n = size
    x, weight = (strided(draw(rows, k, dtype=dtype), layout) for rows in (m, n))
    for _ in range(2):
        with guarded():
            result = call(x, weight, (pcf.mul(0.5),))
        assert result.dtype is dtype
        assert torch.equal(result, F.linear(x.float(), weight.float()).mul(0.5).to(dtype))
    assert binding.launched == 2
    assert binding.last["workspace"] == 0
    assert binding.last["problem"].dtype == support.DTYPES[dtype]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_plans_read_any_strides(dtype: torch.dtype, layout: str, binding: Binding) -> None:
    x, weight = (strided(draw(rows, 7, dtype=dtype), layout) for rows in (5, 3))
    with forced_policy(SimpleNamespace(arch=1)), guarded():  # type: ignore[arg-type]
        found = _launch.lookup(x, weight, None, EMPTY, (), "ieee")
        assert isinstance(found, _launch.Recipe)
        assert found.in_place
        assert not found.aligned
        assert (found.problem.x_leading, found.problem.weight_leading) == (0, 0)
        assert torch.equal(call(x, weight), F.linear(x.float(), weight.float()).to(dtype))
    assert binding.launched == 1


def test_what_is_read_in_place() -> None:
    memory = torch.zeros(64, 64, dtype=torch.float16)
    view = _layout.factor_view
    assert view(memory[:, :60]) == _layout.View(64, 1, False)
    assert view(memory[:, 1:33]) == _layout.View(64, 1, False)  # its address is launch's concern
    assert view(memory[:, :60].contiguous()) == _layout.View(64, 1, True)
    assert view(memory.t()) == _layout.View(64, 1, True)
    assert view(memory[:1].expand(8, 64)) == _layout.View(64, 1, True)
    assert view(memory[:1, :60]) == _layout.View(64, 1, False)
    assert view(memory.view(8, 8, 64)[:, :3]) == _layout.View(64, 1, True)
    assert view(memory.as_strided((9, 16), (8, 1))) == _layout.View(16, 1, True)  # rows overlap


@pytest.mark.parametrize("which", ["x", "weight", "both"])
def test_an_odd_address_under_a_recipe_of_an_even_one(which: str, binding: Binding) -> None:
    arena = draw(6 * 64 + 1, dtype=torch.float16)
    even = arena[:-1].view(6, 64)[:, :32]
    odd = arena[1:].view(6, 64)[:, :32]
    weight = draw(4, 32, dtype=torch.float16)
    shifted = torch.cat((weight.flatten()[:1], weight.flatten()))[1:].view(4, 32)
    assert odd.data_ptr() % 16 == shifted.data_ptr() % 16 == 2
    call(even, weight)
    given = {"x": (odd, weight), "weight": (even, shifted), "both": (odd, shifted)}[which]
    with guarded():
        result = call(*given)
    assert torch.equal(result, F.linear(given[0].float(), given[1].float()).half())
    assert len(_launch._recipes) == 1
    assert binding.launched == 2


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("other", [torch.float32, *NARROW])
def test_operands_that_do_not_promote(dtype: torch.dtype, other, binding: Binding) -> None:
    x, weight = draw(5, 8, dtype=dtype), draw(4, 8, dtype=dtype)
    scalar, full = draw(1, dtype=other)[0] + 2, draw(5, 4, dtype=dtype)
    result = call(x, weight, (pcf.add(full), pcf.mul(scalar), pcf.sub(draw(4, dtype=dtype))))
    exact = (F.linear(x.float(), weight.float()) + full.float()) * scalar.float() - draw(4)
    assert result.dtype is dtype
    assert torch.equal(result, exact.to(dtype))
    assert binding.launched == 1


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("other", [torch.float32, *NARROW])
@pytest.mark.parametrize("shape", [(4,), (1,), (5, 1)], ids=str)
def test_operands_that_promote_are_torchs(dtype, other, shape, binding: Binding) -> None:
    x, weight = draw(5, 8, dtype=dtype), draw(4, 8, dtype=dtype)
    operand = draw(*shape, dtype=other)
    wanted = F.linear(x, weight) * operand
    result = pcf.ops.linear(x, weight, epilogue=(pcf.mul(operand),))
    assert (result.dtype, result.tolist()) == (wanted.dtype, wanted.tolist())
    assert call(x, weight, (pcf.mul(operand),)).dtype is wanted.dtype
    assert (binding.launched > 0) == (other is dtype)
    if other is not dtype:
        reasons = config.counters()["fallback"]
        assert any("promotes" in reason for reason in reasons), reasons


@pytest.mark.parametrize("other", NARROW)
def test_narrow_operands_of_float32(other: torch.dtype, binding: Binding) -> None:
    x, weight = draw(5, 8), draw(4, 8)
    vector, full = draw(4, dtype=other), draw(5, 4, dtype=other)
    result = call(x, weight, (pcf.add(vector), pcf.mul(full)))
    assert torch.equal(result, (F.linear(x, weight) + vector) * full)
    assert binding.launched == 1


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [torch.float32, None])
@pytest.mark.parametrize("running", [torch.float32, None])
def test_batch_norm_dtypes(dtype, training: bool, affine, running, binding: Binding) -> None:
    x, weight = draw(9, 8, dtype=dtype), draw(4, 8, dtype=dtype)
    scale = [draw(4, dtype=affine or dtype), draw(4, dtype=affine or dtype)]
    stats = [draw(4, dtype=running or dtype), torch.full((4,), 4.0, dtype=running or dtype)]
    count = torch.tensor(3)
    wide = [tensor.float() for tensor in stats]
    exact = F.batch_norm(
        F.linear(x.float(), weight.float()), *wide, *(t.float() for t in scale), training
    )
    given = raw.Call(
        *(x, weight, None, None, EMPTY, (), *scale, *stats, count, training, 0.1, 1e-5),
        *(EMPTY, (), "ieee"),
    )
    with guarded():
        out, save = raw._forward_cuda(*raw.flat(given))
    assert (out.dtype, save.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out, exact.to(dtype))
    for one, value in zip(stats, wide, strict=True):
        torch.testing.assert_close(one, value.to(one.dtype))
    assert (int(count), binding.launched) == (3 + training, 1)


@pytest.mark.parametrize(
    "statistics",
    [
        (torch.float32, torch.float16, None, None, None),
        (torch.bfloat16, torch.bfloat16, None, None, None),
        (None, None, torch.float16, torch.float32, None),
        (None, None, None, None, torch.float32),
        (torch.float64, torch.float64, None, None, None),
    ],
)
def test_mixed_batch_norms_are_torchs(statistics) -> None:
    given = [None if dtype is None else torch.zeros((), dtype=dtype) for dtype in statistics]
    assert _gate.why_statistics(torch.float16, given) is not None
    assert _gate.why_statistics(torch.float16, NONE) is None


@pytest.mark.parametrize("bias", NARROW)
def test_a_bias_of_another_dtype_is_refused_as_torch(bias: torch.dtype, binding: Binding) -> None:
    x, layer = draw(5, 8), pcf.nn.Linear(8, 4)
    norm = pcf.nn.LinearScaleBatchNorm1d(8, 4, (4,))
    program = encode((), bias=True)
    operand = draw(4, dtype=bias)
    # A recipe of the same key: a step of that dtype promotes, where a bias raises.
    _launch.lookup(x, layer.weight, None, program, (operand,), "ieee")
    for module, linear in ((layer, layer), (norm, norm.gemm)):
        linear.bias.data = operand
        for _ in range(3):
            with pytest.raises(RuntimeError, match="bias"):
                module(x)
    with pytest.raises(RuntimeError, match="bias"):
        pcf.ops.linear(x, layer.weight, operand)
    assert pcf.ops.linear(x, layer.weight, epilogue=(pcf.add(operand),)).dtype is torch.float32


@pytest.mark.parametrize("dtype", NARROW)
def test_gradients_have_the_inputs_dtypes(dtype: torch.dtype, binding: Binding) -> None:
    x, weight = (draw(*s, dtype=dtype).requires_grad_() for s in ((5, 8), (4, 8)))
    others = (draw(4, dtype=dtype), torch.tensor(1.5), draw(5, 4, dtype=dtype))
    others = [tensor.requires_grad_() for tensor in others]
    twins = [tensor.detach().clone().requires_grad_() for tensor in (x, weight, *others)]
    steps = [pcf.mul(tensor) for tensor in others]
    pcf.ops.linear(x, weight, epilogue=(*steps, pcf.relu())).sum().backward()
    value = F.linear(*twins[:2])
    for twin in twins[2:]:
        value = value * twin
    value.relu().sum().backward()
    for one, twin in zip((x, weight, *others), twins, strict=True):
        assert one.grad.dtype is twin.grad.dtype
        torch.testing.assert_close(one.grad, twin.grad, rtol=0.02, atol=1.0)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kept", [True, False], ids=["float32 norm", "all narrow"])
def test_modules_train(dtype, training: bool, kept: bool, monkeypatch, binding: Binding) -> None:
    torch.manual_seed(1)
    layer = pcf.nn.LinearScaleBatchNorm1d(16, 8, (8,)).to(dtype).train(training)
    if kept:
        layer.bn.float()
    twin = pcf.nn.LinearScaleBatchNorm1d.from_torch(layer.to_torch())
    x, grad = torch.randn(32, 16, dtype=dtype), torch.randn(32, 8, dtype=dtype)
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(_gate, "_ON_CPU", (torch.float32,))
            wanted = twin(x)  # torch's own autograd
        wanted_grads = torch.autograd.grad(wanted, list(layer.parameters()), grad)
        result = layer(x)
        grads = torch.autograd.grad(result, list(layer.parameters()), grad)
        assert result.dtype is wanted.dtype is dtype
        torch.testing.assert_close(result, wanted, rtol=0.05, atol=0.05)
        largest = max(float(other.abs().max()) for other in wanted_grads)
        for one, other in zip(grads, wanted_grads, strict=True):
            assert one.dtype is other.dtype
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.02 * largest)


@pytest.mark.parametrize("tier", ["ieee", "tf32"])
def test_every_tier_but_torchs_is_native(tier: str, binding: Binding) -> None:
    x, weight = draw(5, 8, dtype=torch.float16), draw(4, 8, dtype=torch.float16)
    call(x, weight, precision=tier)
    assert (binding.planned, binding.launched) == (1, 1)
    call(x, weight, precision="torch")
    assert binding.launched == 1
    found = pcf.explain(pcf.ops.linear, x, weight, precision=tier)
    assert (found.path, found.tier, found.notes) == ("fused", "float16", ())
    found = pcf.explain(pcf.ops.linear, x[:, ::2], weight[:, ::2], precision=tier)
    assert [note.split()[0] for note in found.notes] == ["x", "weight"]


def test_logsumexp_recipes_store_one_value_a_row(binding: Binding) -> None:
    for shape, dtype in (((2, 3, 8), torch.float32), ((8,), torch.float16)):
        x, weight = draw(*shape, dtype=dtype), draw(4, 8, dtype=dtype)
        found = _launch.lookup(x, weight, None, EMPTY, (), "ieee", "logsumexp")
        assert isinstance(found, _launch.Recipe)
        result = _launch.launch(found, (x, weight, None))
        wanted = F.linear(x.float(), weight.float()).logsumexp(-1)
        assert (result.shape, result.dtype) == (wanted.shape, dtype)
        torch.testing.assert_close(result, wanted.to(dtype))
