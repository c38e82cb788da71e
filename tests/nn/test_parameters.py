"""Parameters are those of the chain: same draw, same keys, shared or loaded both ways."""

import copy
import pickle

import pytest
import torch
from torch import nn

import pycutfuse as pcf

from ..cases.modules import MODULES, input_of


class Model(nn.Module):
    """Founding problem 3, as its file writes it."""

    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)


PAIRS = {
    "linear": (nn.Linear, pcf.nn.Linear, (7, 5)),
    "no_bias": (nn.Linear, pcf.nn.Linear, (7, 5, False)),
    "norm": (Model, pcf.nn.LinearScaleBatchNorm1d, (7, 5, (5,))),
    "scalar_scale": (Model, pcf.nn.LinearScaleBatchNorm1d, (7, 5, ())),
    "row_scale": (Model, pcf.nn.LinearScaleBatchNorm1d, (7, 5, (1, 5), 1e-3, None)),
}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    theirs, ours, arguments = PAIRS[request.param]
    torch.manual_seed(11)
    original = theirs(*arguments)
    torch.manual_seed(11)
    made = ours(*arguments)
    # The generator must stand where the original left it, too.
    torch.manual_seed(11)
    theirs(*arguments)
    expected = torch.rand(1)
    torch.manual_seed(11)
    ours(*arguments)
    assert torch.equal(torch.rand(1), expected)
    return original, made


def test_same_seed_gives_bitwise_equal_parameters(pair) -> None:
    theirs, ours = pair
    assert list(theirs.state_dict()) == list(ours.state_dict())
    for one, other in zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert [n for n, _ in theirs.named_parameters()] == [n for n, _ in ours.named_parameters()]
    assert [n for n, _ in theirs.named_buffers()] == [n for n, _ in ours.named_buffers()]


def test_state_dicts_load_both_ways(pair) -> None:
    theirs, ours = pair
    changed = {
        name: tensor + 1 if tensor.is_floating_point() else tensor
        for name, tensor in theirs.state_dict().items()
    }
    ours.load_state_dict(changed)
    theirs.load_state_dict(ours.state_dict())
    x = torch.rand(6, 7)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_from_torch_shares_parameters(pair) -> None:
    theirs, ours = pair
    shared = type(ours).from_torch(theirs)
    for one, other in zip(theirs.parameters(), shared.parameters(), strict=True):
        assert one is other
    x = torch.rand(6, 7)
    twin = copy.deepcopy(theirs)
    torch.testing.assert_close(shared(x), twin(x))
    for one, other in zip(theirs.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)  # the original's statistics moved with it
    back = shared.to_torch()
    for one, other in zip(theirs.parameters(), back.parameters(), strict=True):
        assert one is other
    assert list(back.state_dict()) == list(theirs.state_dict())
    assert back.training == theirs.training


def test_epilogue_parameters_are_registered() -> None:
    scale, fixed = nn.Parameter(torch.rand(5)), torch.rand(5)
    layer = pcf.nn.Linear(7, 5, epilogue=(pcf.relu(), pcf.mul(scale), pcf.add(fixed)))
    assert list(layer.state_dict()) == [
        *("weight", "bias", "epilogue.1.weight", "epilogue.2.weight")
    ]
    assert dict(layer.named_parameters())["epilogue.1.weight"] is scale
    assert "epilogue.2.weight" in dict(layer.named_buffers())
    x = torch.rand(3, 7)
    expected = torch.relu(nn.functional.linear(x, layer.weight, layer.bias)) * scale + fixed
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.to_torch()(x), expected)
    layer(x).sum().backward()
    assert scale.grad is not None
    layer.double()
    assert layer.epilogue.get_submodule("2").weight.dtype == torch.float64


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles(how) -> None:
    steps = (pcf.mul(nn.Parameter(torch.rand(5))), pcf.gelu())
    for layer in (
        pcf.nn.Linear(7, 5, epilogue=steps, precision="ieee"),
        pcf.nn.LinearScaleBatchNorm1d(7, 5, (5,), epilogue=steps),
    ):
        made = how(layer).eval()
        x = torch.rand(6, 7)
        assert torch.equal(made(x), layer.eval()(x))
        assert made.precision == layer.precision
        assert not made.frozen


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_compiled_module_are_not_compiled(name: str, how) -> None:
    """As those of torch: what compile() made runs the original, with its parameters."""
    layer, x = MODULES[name]().eval(), input_of(name)
    with torch.no_grad():
        before = layer(x)
        layer.compile(backend="eager")
        made = how(layer)
        torch.testing.assert_close(made(x), before)
        for parameter in made.parameters():
            parameter.add_(1)
        assert not torch.equal(made(x), before)
        assert torch.equal(made(x), made.to_torch()(x))


def test_reset_parameters_draws_as_torch() -> None:
    theirs, ours = nn.Linear(7, 5), pcf.nn.Linear(7, 5)
    for layer in (theirs, ours):
        torch.manual_seed(3)
        layer.reset_parameters()
    assert torch.equal(theirs.weight, ours.weight)
    assert torch.equal(theirs.bias, ours.bias)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_compute_as_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = pcf.nn.Linear(7, 5, dtype=dtype)
    x = torch.rand(4, 7, dtype=dtype)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    norm = pcf.nn.LinearScaleBatchNorm1d(7, 5, (5,)).to(dtype)
    chain = copy.deepcopy(norm.to_torch())
    assert torch.equal(norm(x), chain(x))
    assert torch.equal(norm.bn.running_var, chain.bn.running_var)


def test_device_and_dtype_reach_all_parameters() -> None:
    layer = pcf.nn.LinearScaleBatchNorm1d(7, 5, (5,), device="meta", dtype=torch.float64)
    assert all(p.is_meta for p in layer.parameters())
    assert all(p.dtype == torch.float64 for p in layer.parameters())


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
    for kind in (pcf.nn.Linear, pcf.nn.LinearScaleBatchNorm1d):
        with pytest.raises(TypeError, match="must be a"):
            kind.from_torch(source)


def test_from_torch_refuses_hooks_that_would_be_lost() -> None:
    source = nn.Linear(2, 2)
    source.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks"):
        pcf.nn.Linear.from_torch(source)


def test_texts() -> None:
    steps = (pcf.mul(2.0), pcf.add(torch.ones(5)), pcf.clamp(0, 6), pcf.mul(0.0), pcf.relu())
    text = repr(pcf.nn.Linear(7, 5, bias=False, epilogue=steps))
    assert "in_features=7, out_features=5, bias=False" in text
    for step in ("mul(2)", "add(weight of (5,))", "clamp(0, 6)", "mul(0)", "relu"):
        assert f"EpilogueStep({step})" in text
    assert "scale=(5,)" in repr(pcf.nn.LinearScaleBatchNorm1d(7, 5, (5,)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_a_weight_of_none_is_no_tensor_as_in_torch(name: str, bias: bool) -> None:
    layer = MODULES[name]()
    holder = next(one for one in layer.modules() if "weight" in one._parameters)
    holder.weight = None
    if not bias:
        holder.bias = None
    with pytest.raises(TypeError):
        layer(input_of(name))


def test_a_bias_of_none_is_none_as_in_torch() -> None:
    made = (pcf.nn.Linear(3, 4, None), pcf.nn.LinearLogSumExp(3, 4, None))
    convolutions = (pcf.nn.Conv2d, pcf.nn.ConvTranspose2d)
    for layer in (*made, *(kind(3, 4, 3, bias=None) for kind in convolutions)):
        assert layer.bias is None
    assert pcf.nn.Conv2dBatchNorm2dScale(3, 4, 3, 2.0, bias=None).conv.bias is None
    with pytest.raises(ValueError, match="has 17;"):
        pcf.nn.Linear(3, 4, None, epilogue=(pcf.relu(),) * 17)


def test_input_may_be_named_as_in_torch() -> None:
    for layer in (pcf.nn.Linear(3, 4), pcf.nn.LinearLogSumExp(3, 4)):
        assert torch.equal(layer(input=torch.ones(2, 3)), layer(torch.ones(2, 3)))
    assert pcf.explain(pcf.nn.Linear(3, 4), input=torch.ones(2, 3)).path == "fallback"
    x = torch.ones(1, 3, 5, 5)
    for layer in (pcf.nn.Conv2d(3, 4, 3), pcf.nn.ConvTranspose2d(3, 4, 3)):
        assert torch.equal(layer(input=x), layer(x))
        assert pcf.explain(layer, input=x).path == "fallback"
