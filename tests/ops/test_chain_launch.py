"""What crosses the border to the library for two linear layers and a logsumexp."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pycutfuse as pcf
from pycutfuse import config
from pycutfuse.ops import _chain, _chain_launch, _launch, _linear_logsumexp, _memo
from pycutfuse.program import encode, operands_of
from pycutfuse.testing import LAYOUTS, guarded, strided

from .simulated_chain import ChainBinding, install_chain

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = [(6, 5, 7, 4), (1, 1, 1, 1), (3, 8, 16, 1), (9, 16, 8, 24)]


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChainBinding]:
    yield install_chain(monkeypatch)
    _launch.clear_caches()


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def layer(weight: Tensor, *steps) -> _chain.Layer:
    return _chain.Layer(weight, None, None, encode(steps), operands_of(steps))


def call(x: Tensor, first: _chain.Layer, second: _chain.Layer, tier: str = "ieee") -> Tensor:
    return _chain._forward_cuda(*_chain_launch.flat(_chain.Call(x, first, second, tier)))


def close(result: Tensor, exact: Tensor) -> None:
    rounding = torch.finfo(result.dtype).eps
    torch.testing.assert_close(result.double(), exact, rtol=16 * rounding, atol=16 * rounding)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_addresses(size, layout: str, dtype, binding: ChainBinding) -> None:
    m, k, hidden, n = size
    x, weight = (strided(draw(r, k, dtype=dtype), layout) for r in (m, hidden))
    second, full = (strided(draw(r, hidden, dtype=dtype), layout) for r in (n, m))
    bias = draw(n, dtype=dtype)
    for _ in range(2):
        with guarded():
            result = call(x, layer(weight, pcf.mul(full), pcf.tanh()), layer(second, pcf.add(bias)))
        wide = [tensor.double() for tensor in (x, weight, full, second, bias)]
        inner = torch.tanh(F.linear(*wide[:2]) * wide[2])
        assert result.dtype == dtype
        close(result, torch.logsumexp(F.linear(inner, *wide[3:]), 1))
    assert binding.launched == 2


@pytest.mark.parametrize(
    "make",
    [lambda x: x, lambda x: x.transpose(0, 1), lambda x: x[0], lambda x: x[0, 0]],
    ids="plain permuted matrix vector".split(),
)
def test_inputs_of_any_dimension(make: Callable[[Tensor], Tensor], binding: ChainBinding) -> None:
    x, weight, second = make(draw(3, 4, 5)), draw(6, 5), draw(7, 6)
    result = call(x, layer(weight, pcf.sigmoid()), layer(second))
    expected = torch.logsumexp(torch.sigmoid(x @ weight.T) @ second.T, -1)
    assert result.shape == expected.shape
    torch.testing.assert_close(result, expected)
    assert binding.launched == 1


def test_a_recipe_serves_all_calls_of_its_kind(binding: ChainBinding) -> None:
    first, second = layer(draw(6, 5), pcf.sigmoid()), layer(draw(7, 6))
    for x in (draw(3, 5), draw(3, 5), draw(5, 3).t()):
        call(x, first, second)
    assert (binding.planned, binding.launched) == (1, 3)
    call(draw(4, 5), first, second)
    call(draw(3, 5), first, second, "tf32")
    assert binding.planned == 3
    assert binding.last["problems"][0].precision == binding.last["problems"][1].precision == 1


def test_caches_stay_bounded(binding: ChainBinding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_chain_launch, "MAX_RECIPES", 4)
    first, second = layer(draw(6, 5), pcf.sigmoid()), layer(draw(7, 6))
    for rows in range(1, 20):
        call(draw(rows, 5), first, second)
    assert len(_chain_launch._recipes) <= 4
    assert len(_chain_launch._plans) <= 4


def test_odd_addresses_of_16_bit_tensors(binding: ChainBinding) -> None:
    memory = draw(1 + 3 * 16).half()
    x, weight, second = memory[1:].view(3, 16), draw(8, 16).half(), draw(4, 8).half()
    for at in range(2):
        moved = x if at == 0 else x.clone()
        result = call(moved, layer(weight, pcf.relu()), layer(second))
        inner = torch.relu(x.double() @ weight.double().T)
        close(result, torch.logsumexp(inner @ second.double().T, 1))
    assert binding.launched == 2


@pytest.mark.parametrize(
    ("change", "detour"),
    [
        (lambda t: t.update(x=draw(3, 4001), first=draw(6, 4001)), "handover"),
        (lambda t: t.update(x=draw(0, 5)), "handover"),
        (lambda t: t.update(x=draw(3, 0), first=draw(6, 0)), "handover"),
        (lambda t: t.update(first=draw(0, 5), second=draw(7, 0)), "handover"),
        (lambda t: t.update(second=draw(0, 6)), "handover"),
        (lambda t: t.update({name: tensor.double() for name, tensor in t.items()}), "fallback"),
    ],
    ids="limit no_rows no_inputs no_hidden no_features double".split(),
)
def test_what_torch_runs(change, detour: str, binding: ChainBinding) -> None:
    given = {"x": draw(3, 5), "first": draw(6, 5), "second": draw(7, 6)}
    change(given)
    result = call(given["x"], layer(given["first"], pcf.sigmoid()), layer(given["second"]))
    hidden = torch.sigmoid(given["x"] @ given["first"].T)
    torch.testing.assert_close(result, torch.logsumexp(hidden @ given["second"].T, 1))
    assert (binding.launched, binding.planned) == (0, 0)
    assert sum(config.counters()[detour].values()) == 1


def test_invalid_calls(binding: ChainBinding) -> None:
    x, first, second = draw(3, 5), draw(6, 5), draw(7, 6)
    for given, words in (
        ((draw(3, 4), layer(first), layer(second)), "features"),
        ((x, layer(first), layer(draw(7, 5))), r"\(7, 5\) but the first layer has 6"),
        ((x, layer(first), layer(draw(7))), "out_features, 6"),
        ((x, layer(first, pcf.add(draw(5))), layer(second)), "first program: operand 0"),
        ((x, layer(first), layer(second, pcf.add(draw(6)))), "second program: operand 0"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call(*given)


def test_planes_are_given_where_there_are_any(binding: ChainBinding, monkeypatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(_chain_launch, "order", lambda *given: seen.append(given[0].numel()))
    x, weights = draw(3, 5), (draw(6, 5), draw(7, 6))
    for which in range(4):
        layers = []
        for at, weight in enumerate(weights):
            found = layer(weight, pcf.sigmoid())
            if which >> at & 1:
                shape = (2, len(weight), 2 * binding.planes_layout(*weight.shape, 2)[0])
                planes, words = torch.zeros(shape, dtype=torch.uint8), torch.zeros(8).int()
                found = found._replace(planes=planes, words=words)
            layers.append(found)
        call(x, *layers)
        frozen = [problem.weight_planes for problem in binding.last["problems"]]
        assert frozen == [bool(which & 1), bool(which & 2)]
    assert len(seen) == 4
    stale = layers[0]._replace(planes=torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="unfreeze"):
        call(x, stale, layers[1])


@pytest.fixture(params=[True, False], ids=["guard", "no guard"])
def eager(request: pytest.FixtureRequest, binding: ChainBinding, monkeypatch) -> ChainBinding:
    """Modules on host tensors reach the simulated binding."""
    monkeypatch.setattr(_memo.Memo, "trusted", request.param)
    monkeypatch.setattr(_chain, "_forward_op", _chain._forward_cuda)
    monkeypatch.setattr(config, "resolve_tier", lambda precision: "ieee")
    return binding


@pytest.mark.parametrize("grad", [False, True])
def test_a_module_remembers_its_recipe(grad: bool, eager: ChainBinding) -> None:
    torch.manual_seed(0)
    model = pcf.nn.LinearSigmoidLinearLogSumExp(5, 6, 4)
    twin = model.to_torch()
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: model.linear1.weight.data.mul_(2),
        lambda: setattr(model.linear2.weight, "data", draw(6, 4).t()),
        lambda: model.linear2.register_parameter("bias", None),
        lambda: setattr(model.linear1, "bias", nn.Parameter(draw(6))),
    ]
    with torch.set_grad_enabled(grad):
        for change in changes:
            change()
            for rows in (3, 3, 3, 8, 3):
                x = draw(rows, 5)
                torch.testing.assert_close(model(x), twin(x))
    assert eager.launched == 5 * len(changes)


def test_gradients_through_a_remembered_recipe(eager: ChainBinding) -> None:
    model = pcf.nn.LinearSigmoidLinearLogSumExp(5, 6, 4)
    twin = model.to_torch()
    parameters = list(model.parameters())
    for _ in range(3):
        x = draw(3, 5).requires_grad_()
        ours = torch.autograd.grad(model(x).square().sum(), [x, *parameters])
        theirs = torch.autograd.grad(twin(x).square().sum(), [x, *parameters])
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)
    assert eager.launched == 3


def test_a_planned_call_explained(eager: ChainBinding) -> None:
    model = pcf.nn.LinearSigmoidLinearLogSumExp(5, 6, 4)
    found = pcf.explain(model, draw(3, 5))
    assert (found.path, found.stages) == ("fused", ("first stage", "second stage"))
    assert "2^40" in str(found)
    wide = pcf.nn.LinearSigmoidLinearLogSumExp(5000, 6, 4)
    found = pcf.explain(wide, draw(3, 5000))
    assert (found.path, found.reason) == ("hand-over", "K is over the limit of 4000")


def test_one_layer_reduces_by_the_same_tail(binding: ChainBinding) -> None:
    for shape in ((3, 5), (2, 3, 5), (5,)):
        x, weight, bias = draw(*shape), draw(4, 5), draw(4)
        program = encode((), bias=True)
        for _ in range(2):
            with guarded():
                head = (x, weight, None, None, program.codes, program.constants)
                result = _linear_logsumexp._forward_cuda(*head, [bias], "ieee")
            expected = torch.logsumexp(F.linear(x, weight, bias), -1)
            assert result.shape == expected.shape
            torch.testing.assert_close(result, expected)
    assert binding.launched == 6
