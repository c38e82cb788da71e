"""LinearLogSumExp and LinearSigmoidLinearLogSumExp are their chains: parameters, copies, hooks."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import pycutfuse as pcf

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
TWO = "linear_linear_logsumexp"


class Model(nn.Module):
    """Founding problem 5, as its file writes it."""

    def __init__(self, input_size, hidden_size, output_size):
        super().__init__()
        self.linear1 = nn.Linear(input_size, hidden_size)
        self.linear2 = nn.Linear(hidden_size, output_size)

    def forward(self, x):
        return torch.logsumexp(self.linear2(torch.sigmoid(self.linear1(x))), dim=1)


class One(nn.Linear):
    """A linear layer and the reduction of its features."""

    def forward(self, x):
        return torch.logsumexp(super().forward(x), -1)


PAIRS = {
    "one": (One, pcf.nn.LinearLogSumExp, (7, 5)),
    "no_bias": (One, pcf.nn.LinearLogSumExp, (7, 5, False)),
    "two": (Model, pcf.nn.LinearSigmoidLinearLogSumExp, (7, 6, 5)),
}


def batch(*shape: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    theirs, ours, arguments = PAIRS[request.param]
    made, drawn = [], []
    for kind in (theirs, ours):
        torch.manual_seed(11)
        made.append(kind(*arguments))
        drawn.append(torch.rand(1))
    assert torch.equal(*drawn)  # the generator stands where the original left it
    return made[0], made[1]


def test_same_seed_gives_bitwise_equal_parameters(pair) -> None:
    theirs, ours = pair
    assert list(theirs.state_dict()) == list(ours.state_dict())
    for one, other in zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert [n for n, _ in theirs.named_parameters()] == [n for n, _ in ours.named_parameters()]
    assert not list(ours.named_buffers())


def test_state_dicts_load_both_ways(pair) -> None:
    theirs, ours = pair
    ours.load_state_dict({name: tensor + 1 for name, tensor in theirs.state_dict().items()})
    theirs.load_state_dict(ours.state_dict())
    x = batch(6, 7)
    torch.testing.assert_close(ours(x), theirs(x))


def test_from_torch_and_to_torch_share_parameters(pair) -> None:
    theirs, ours = pair
    source = theirs.eval()
    if isinstance(theirs, One):
        source = nn.Linear(7, 5, theirs.bias is not None).eval()
        source.weight, source.bias = theirs.weight, theirs.bias
    shared = type(ours).from_torch(source, precision="ieee")
    back = shared.to_torch()
    assert not shared.training
    assert not back.training
    assert shared.precision == "ieee"
    assert list(back.state_dict()) == list(theirs.state_dict())
    for one, other, third in zip(
        theirs.parameters(), shared.parameters(), back.parameters(), strict=True
    ):
        assert one is other is third
    x = batch(6, 7)
    torch.testing.assert_close(shared(x), theirs(x))
    torch.testing.assert_close(back(x), theirs(x))


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles(pair, how) -> None:
    ours = pair[1]
    made = how(ours)
    assert torch.equal(made(batch(6, 7)), ours(batch(6, 7)))
    assert made._memo is not ours._memo
    assert type(made._memo) is type(ours._memo)
    assert not made.frozen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_compute_as_torch(pair, dtype: torch.dtype) -> None:
    theirs, ours = (module.to(dtype) for module in pair)
    x = batch(6, 7).to(dtype)
    assert torch.equal(ours(x), theirs(x))


def test_device_and_dtype_reach_all_parameters() -> None:
    for layer in (
        pcf.nn.LinearLogSumExp(7, 5, device="meta", dtype=torch.float64),
        pcf.nn.LinearSigmoidLinearLogSumExp(7, 6, 5, "meta", torch.float64),
    ):
        assert all(p.is_meta and p.dtype == torch.float64 for p in layer.parameters())
        assert layer.float()(torch.empty(6, 7, device="meta")).shape == (6,)


@pytest.mark.parametrize(
    "source",
    [
        nn.Conv2d(1, 1, 1),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        nn.Identity(),
        pcf.nn.Linear(2, 2),
    ],
)
def test_from_torch_refuses_what_it_cannot_replace(source: nn.Module) -> None:
    for kind in (pcf.nn.LinearLogSumExp, pcf.nn.LinearSigmoidLinearLogSumExp):
        with pytest.raises(TypeError, match="must be a"):
            kind.from_torch(source)
    model = Model(3, 2, 2)
    model.linear2 = source
    with pytest.raises(TypeError, match="linear2"):
        pcf.nn.LinearSigmoidLinearLogSumExp.from_torch(model)


def test_texts() -> None:
    layer = pcf.nn.LinearLogSumExp(7, 5, bias=False, epilogue=(pcf.mul(2.0),))
    assert "LinearLogSumExp(\n  in_features=7, out_features=5, bias=False" in repr(layer)
    text = repr(pcf.nn.LinearSigmoidLinearLogSumExp(7, 6, 5))
    assert "(linear2): Linear(in_features=6, out_features=5, bias=True)" in text


@pytest.mark.parametrize("shape", [(7,), (6, 7), (2, 3, 7), (2, 0, 7), (2, 1, 3, 7)], ids=str)
def test_one_layer_takes_any_dimension(shape, device: torch.device) -> None:
    steps = (pcf.relu(), pcf.mul(nn.Parameter(torch.rand(5))))
    layer = pcf.nn.LinearLogSumExp(7, 5, epilogue=steps).to(device)
    assert list(layer.state_dict()) == ["weight", "bias", "epilogue.1.weight"]
    result, expected = (
        layer(batch(*shape, device=device)),
        layer.to_torch()(batch(*shape, device=device)),
    )
    assert result.shape == shape[:-1]
    torch.testing.assert_close(result, expected, **CLOSE)


def test_two_layers_reduce_dimension_1(device: torch.device) -> None:
    layer = pcf.nn.LinearSigmoidLinearLogSumExp(7, 6, 5, device=device)
    x = batch(2, 3, 7, device=device)
    assert layer(x).shape == (2, 5)
    torch.testing.assert_close(layer(x), layer.to_torch()(x), **CLOSE)
    assert f"{TWO}: an input of 3 dimensions" in pcf.counters()["fallback"]
    with pytest.raises(IndexError):
        layer(x[0, 0])
    with pytest.raises(RuntimeError, match="7"):
        layer(x[0, :, :6])
    with pytest.raises(TypeError, match="Tensor"):
        layer([1.0])


@pytest.mark.parametrize("biases", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_layers_without_biases(biases, rows: int, device: torch.device) -> None:
    model = Model(7, 6, 5)
    for child, has_bias in zip((model.linear1, model.linear2), biases, strict=True):
        if not has_bias:
            child.register_parameter("bias", None)
    model.to(device)
    ours, twin = pcf.nn.LinearSigmoidLinearLogSumExp.from_torch(model), copy.deepcopy(model)
    x = batch(rows, 7, device=device).requires_grad_()
    y = x.detach().clone().requires_grad_()
    result, expected = ours(x), twin(y)
    torch.testing.assert_close(result, expected, **CLOSE)
    result.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, y.grad, **CLOSE)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **CLOSE)


@pytest.mark.parametrize("child", ["linear1", "linear2"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "instance"])
def test_hooks_on_children_run(child: str, kind: str, device: torch.device) -> None:
    layer = pcf.nn.LinearSigmoidLinearLogSumExp(7, 6, 5, device=device)
    plain = copy.deepcopy(layer.to_torch())
    x = batch(9, 7, device=device).requires_grad_()
    module, seen = layer.get_submodule(child), []
    if kind == "instance":
        inner = module.forward
        module.forward = lambda value: seen.append(1) or inner(value)
    else:
        getattr(module, f"register_{kind}_hook")(lambda *_: seen.append(1))
    result = layer(x)
    result.sum().backward()
    assert seen == [1]
    torch.testing.assert_close(result, plain(x), **CLOSE)
    assert f"{TWO}: hooks on a child" in pcf.counters()["fallback"]
    assert pcf.explain(layer, x).reason == "hooks on a child"


def test_hooks_for_all_modules_run() -> None:
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    try:
        pcf.nn.LinearSigmoidLinearLogSumExp(7, 6, 5)(batch(9, 7))
    finally:
        handle.remove()
    assert seen == ["Linear", "Linear", "LinearSigmoidLinearLogSumExp"]


def test_parametrized_replaced_and_moved_children(device: torch.device) -> None:
    layer = pcf.nn.LinearSigmoidLinearLogSumExp(7, 6, 5, device=device)
    x = batch(9, 7, device=device)
    expected = layer(x)
    weight = layer.linear1.weight.detach()
    del layer.linear1.weight
    layer.linear1.weight = weight  # as FSDP does
    torch.testing.assert_close(layer(x), expected, **CLOSE)
    layer = pcf.nn.LinearSigmoidLinearLogSumExp(7, 6, 5, device=device)
    nn.utils.parametrizations.weight_norm(layer.linear2)
    torch.testing.assert_close(layer(x), layer.to_torch()(x), **CLOSE)
    layer.linear2 = nn.Sequential(layer.linear2, nn.Tanh())
    torch.testing.assert_close(layer(x), layer.to_torch()(x), **CLOSE)
    reasons = " ".join(pcf.counters()["fallback"])
    assert "moved" in reasons
    assert "another type" in reasons


def test_hooks_on_a_step_of_one_layer(device: torch.device) -> None:
    layer = pcf.nn.LinearLogSumExp(7, 5, device=device, epilogue=(pcf.tanh(),))
    expected, seen = layer(batch(9, 7, device=device)), []
    for module, where in (("epilogue.0", "a step"), ("epilogue", "the epilogue")):
        hook = layer.get_submodule(module).register_forward_hook(lambda *_: seen.append(1))
        torch.testing.assert_close(layer(batch(9, 7, device=device)), expected, **CLOSE)
        assert seen == [1]
        assert f"linear_logsumexp: hooks on {where}" in pcf.counters()["fallback"]
        hook.remove()
        seen.clear()


def test_functional_call_swaps_parameters(device: torch.device) -> None:
    layer = pcf.nn.LinearSigmoidLinearLogSumExp(7, 6, 5, device=device)
    x = batch(9, 7, device=device)
    other = {name: p.detach() * 2 for name, p in layer.named_parameters()}
    found = torch.func.functional_call(layer, other, (x,))
    expected = torch.func.functional_call(layer.to_torch(), other, (x,))
    torch.testing.assert_close(found, expected, **CLOSE)


def test_the_error_policy_and_scripting() -> None:
    layer = pcf.nn.LinearSigmoidLinearLogSumExp(7, 6, 5)
    with pytest.raises(NotImplementedError, match=r"torch\.compile"):
        torch.jit.script(layer)
    pcf.set_fallback_policy("error")
    with pytest.raises(pcf.FallbackError, match=f"{TWO}: cpu tensors"):
        layer(batch(9, 7))
