"""Invalid calls raise torch's exception type with value, limit and remedy, and change nothing."""

import copy

import pytest
import torch

import pycutfuse as pcf
from pycutfuse.ops._linear_batch_norm import CHECKS_EPS

from ..cases.invalid import BATCH_NORM, LINEAR, InvalidCase


def raised(call, device: torch.device) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the type is what is compared
        call(device)
    return caught.value


@pytest.mark.parametrize("case", LINEAR + BATCH_NORM, ids=str)
def test_same_exception_type_as_torch(case: InvalidCase, device: torch.device) -> None:
    ours, theirs = raised(case.ours, device), raised(case.theirs, device)
    assert type(ours) is type(theirs), (ours, theirs)
    for word in case.words:
        assert word in str(ours)


@pytest.mark.parametrize("shape", [(3,), (5, 4), (2, 6, 4), (6, 1, 1)], ids=str)
def test_an_operand_must_not_grow_the_output(shape, device: torch.device) -> None:
    x, weight = torch.ones(6, 5, device=device), torch.ones(4, 5, device=device)
    operand = torch.ones(shape, device=device)
    with pytest.raises(RuntimeError, match=r"operand 1 has shape .* output's \(6, 4\)"):
        pcf.ops.linear(x, weight, torch.ones(4, device=device), epilogue=(pcf.mul(operand),))


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: pcf.add("one"), TypeError, "str"),
        (lambda: pcf.mul(True), TypeError, "bool"),
        (lambda: pcf.div(1j), TypeError, "complex"),
        (lambda: pcf.minimum(torch.ones(3)), TypeError, "Tensor"),
        (lambda: pcf.maximum(float("nan")), ValueError, "NaN"),
        (lambda: pcf.leaky_relu(None), TypeError, "NoneType"),
        (lambda: pcf.gelu(approximate="erf"), RuntimeError, "'none' or 'tanh'"),
        (lambda: pcf.clamp(), RuntimeError, "at least one"),
        (lambda: pcf.clamp(float("nan")), ValueError, "NaN"),
        (lambda: pcf.hardtanh(2.0, 1.0), ValueError, "greater"),
        (lambda: pcf.hardtanh("a"), TypeError, "hardtanh: min_val is a str"),
        (lambda: pcf.hardtanh(0.0, None), TypeError, "hardtanh: max_val is a NoneType"),
        (lambda: pcf.hardtanh(float("nan")), ValueError, "hardtanh: a bound is NaN"),
        (lambda: pcf.nn.Linear(2, 2, epilogue=(pcf.relu,)), TypeError, "relu()"),
        (lambda: pcf.nn.Linear(2, 2, epilogue=("relu",)), TypeError, "step 0"),
        (lambda: pcf.nn.Linear(2, 2, epilogue=(torch.nn.ReLU(),)), TypeError, "is a ReLU"),
        (lambda: pcf.nn.Linear(2, 2, epilogue=pcf.relu()), TypeError, "is a Step; it must be a"),
        (lambda: pcf.nn.Linear(2, 2, epilogue=None), TypeError, "is a NoneType; it must be a"),
        (lambda: pcf.nn.Linear(2, 2, epilogue={pcf.relu()}), TypeError, "is a set; it must be a"),
        (
            lambda: pcf.nn.Conv2dBatchNorm2dScale(2, 2, 1, 1.0, epilogue=pcf.relu()),
            TypeError,
            "is a Step; it must be a",
        ),
        (lambda: pcf.nn.Linear(2, 2, epilogue=(pcf.relu(),) * 16), ValueError, "at most 16"),
        (lambda: pcf.nn.Linear(2, 2, precision="fp32"), ValueError, "ieee"),
        (lambda: pcf.precision("exact"), ValueError, "ieee"),
        (lambda: pcf.set_fallback_policy("never"), ValueError, "warn once"),
        (lambda: pcf.nn.Linear(-1, 2), RuntimeError, "-1"),
        (lambda: pcf.freeze(torch.nn.ReLU()), ValueError, "pycutfuse"),
        (lambda: pcf.explain(torch.nn.ReLU()), TypeError, "ReLU"),
    ],
)
def test_malformed_programs_and_options(build, error, words) -> None:
    with pytest.raises(error) as caught:
        build()
    assert words in str(caught.value)


@pytest.mark.parametrize("value", ["bogus", "", 1, ["ieee"]])
def test_a_precision_that_is_assigned_is_checked_as_the_constructors(value) -> None:
    layer = pcf.nn.Conv2dBatchNorm2dScale(2, 2, 1, 1.0, precision="tf32")
    with pytest.raises(ValueError, match="use one of ieee, tf32, torch, or None"):
        layer.precision = value
    assert layer.precision == "tf32"
    layer.precision = None
    assert layer.precision is None


def test_torchs_functions_are_not_called_steps() -> None:
    with pytest.raises(TypeError) as caught:
        pcf.nn.Linear(2, 2, epilogue=(torch.relu,))
    assert "call it" not in str(caught.value)


def test_sixteen_steps_are_allowed_without_a_bias() -> None:
    layer = pcf.nn.Linear(2, 2, bias=False, epilogue=(pcf.add(1.0),) * 16)
    x = torch.ones(1, 2)
    torch.testing.assert_close(layer(x), x @ layer.weight.T + 16)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_refused_batch_changes_no_state(rows: int, device: torch.device) -> None:
    layer = pcf.nn.LinearScaleBatchNorm1d(5, 4, (4,), device=device)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    bad = torch.ones(rows, 5 if rows == 1 else 6, device=device)
    with pytest.raises((ValueError, RuntimeError)):
        layer(bad)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_mismatched_running_statistic_changes_no_state(device: torch.device) -> None:
    layer = pcf.nn.LinearScaleBatchNorm1d(5, 4, (4,), device=device)
    layer.bn.running_var = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="running_var"):
        layer(torch.ones(6, 5, device=device))
    assert int(layer.bn.num_batches_tracked) == 0


@pytest.mark.parametrize("value", [None, [1.0, 2.0], 3.0])
def test_modules_refuse_what_is_no_tensor(value) -> None:
    for layer in (pcf.nn.Linear(2, 2), pcf.nn.LinearScaleBatchNorm1d(2, 2, (2,))):
        with pytest.raises(TypeError, match="Tensor"):
            layer(value)


@pytest.mark.cuda
def test_mixed_devices_raise_as_torch(cuda: torch.device) -> None:
    layer = pcf.nn.Linear(5, 4, device=cuda)
    with pytest.raises(RuntimeError, match="same device"):
        layer(torch.ones(3, 5))


def test_overflowing_sizes_raise(device: torch.device) -> None:
    x = torch.ones(1, 1, device=device).expand(2**40, 1)
    weight = torch.ones(1, 1, device=device).expand(2**40, 1)
    with pytest.raises(RuntimeError):
        pcf.ops.linear(x, weight)


def test_torch_jit_script_says_what_to_do() -> None:
    for layer in (pcf.nn.Linear(2, 2), torch.nn.Sequential(pcf.nn.Linear(2, 2))):
        with pytest.raises(NotImplementedError, match=r"torch\.compile"):
            torch.jit.script(layer)


@pytest.mark.parametrize(
    "steps",
    [(pcf.relu,), ("relu",), (None,), (torch.ones(4),)],
    ids=["function", "name", "None", "tensor"],
)
def test_what_is_no_step(steps) -> None:
    x, weight = torch.ones(6, 5), torch.ones(4, 5)
    for call in (
        lambda: pcf.ops.linear(x, weight, epilogue=steps),
        lambda: pcf.ops.linear_batch_norm(x, weight, epilogue=steps, training=True),
        lambda: pcf.ops.linear_batch_norm(x, weight, after=steps, training=True),
    ):
        with pytest.raises(TypeError, match="step 0"):
            call()


@pytest.mark.skipif(not CHECKS_EPS, reason="torch takes any eps")
@pytest.mark.parametrize("eps", [0.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_eps_that_does_not_add(eps: float, dtype: torch.dtype, device: torch.device) -> None:
    given = (
        (torch.rand(6, 5, device=device, dtype=dtype),),
        (torch.rand(2, 5, 3, 3).to(device, dtype),),
    )
    layers = pcf.nn.LinearScaleBatchNorm1d(5, 4, ()), pcf.nn.Conv2dBatchNorm2dScale(5, 4, 3, 2.0)
    for (x,), layer in zip(given, layers, strict=True):
        layer.to(device, dtype)
        for _ in range(3):
            layer(x)
        layer.bn.eps = eps
        with pytest.raises(ValueError, match=f"eps is {eps}; it must be above 0"):
            layer(x)
        assert int(layer.bn.num_batches_tracked) == 3
        if eps < 0:  # torch 2.10 refuses 0 in eval, too
            with pytest.raises(ValueError, match="at least 0"):
                layer.eval()(x)


@pytest.mark.parametrize("eps", ["small", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_eps_that_is_no_number(eps, dtype: torch.dtype, device: torch.device) -> None:
    x, layer = torch.ones(6, 5, device=device, dtype=dtype), pcf.nn.LinearScaleBatchNorm1d(5, 4, ())
    layer.to(device, dtype)
    layer(x)
    layer.bn.eps = eps
    for call in (
        lambda: layer(x),
        lambda: pcf.ops.linear_batch_norm(x, layer.gemm.weight, training=True, eps=eps),
    ):
        with pytest.raises(TypeError):
            call()
    assert int(layer.bn.num_batches_tracked) == 1


@pytest.mark.parametrize("shape", [(3, 2), (1, 3, 1), (2,)], ids=str)
def test_the_plain_chain_grows_no_output_either(shape) -> None:
    x, weight = torch.ones(3, 5).double(), torch.ones(1, 5).double()
    with pytest.raises(RuntimeError, match="operand 0"):
        pcf.ops.linear(x, weight, epilogue=(pcf.mul(torch.ones(shape).double()),))


def test_a_bias_of_one_feature_has_one_element() -> None:
    for dtype in (torch.float32, torch.float64):
        x, weight, bias = (torch.ones(s, dtype=dtype) for s in ((3, 5), (1, 5), (2,)))
        with pytest.raises(RuntimeError, match="shape"):
            pcf.ops.linear(x, weight, bias)


def test_an_empty_batch_of_a_number_as_scale(device: torch.device) -> None:
    layer = pcf.nn.LinearScaleBatchNorm1d(5, 4, (), device=device)
    ours, theirs = (
        copy.deepcopy(one)(torch.ones(0, 5, device=device)) for one in (layer, layer.to_torch())
    )
    assert ours.shape == theirs.shape == (0, 4)


def test_a_step_of_another_dtype_promotes_where_a_bias_raises() -> None:
    x, weight, vector = torch.ones(3, 5), torch.ones(4, 5), torch.ones(4).double()
    result = pcf.ops.linear(x, weight, epilogue=(pcf.add(vector),))
    assert result.dtype is torch.float64
    with pytest.raises(RuntimeError, match="bias"):
        pcf.ops.linear(x, weight, vector)
