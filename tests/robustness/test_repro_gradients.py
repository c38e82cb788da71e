"""The fuzzer's judgement of gradients: no alarm where they cancel, no wrong one let through."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pycutfuse.testing.repro import (
    BatchNorm,
    LinearConfig,
    StepRecipe,
    TensorRecipe,
    calls,
    check,
    checking,
)
from pycutfuse.testing.repro.case import Case, make_case
from pycutfuse.testing.repro.envelope import Rounding
from pycutfuse.testing.repro.gradients import typical_errors

ON_CPU = LinearConfig(
    seed=1,
    x=TensorRecipe((17, 65)),
    weight=TensorRecipe((9, 65)),
    program=(StepRecipe("mul", operand=TensorRecipe((), on_cpu=True)),),
    backward=("x", "weight", "step0"),
)
# A batch of equal rows: the batch norm's vjp takes the mean off, so weight's gradient is 0. Rows of
# an input that is moved by TF32's rounding have a variance far above eps, so its gradients, and
# their errors, are smaller.
EQUAL_ROWS = LinearConfig(
    seed=925,
    x=TensorRecipe((64, 256), fill="integers", layout="expanded"),
    weight=TensorRecipe((16, 256), fill="integers"),
    tail=BatchNorm(affine=False, track=False, eps=1e-6),
    backward=("x", "weight"),
)


def judged(
    monkeypatch: pytest.MonkeyPatch, config: LinearConfig, change: Callable[[Tensor], Tensor]
) -> str:
    """The verdict at TF32 where backward changes the gradient that enters its contractions."""
    linear = F.linear

    def changed(*given: Tensor) -> Tensor:
        value = linear(*given)
        value.register_hook(change)
        return value

    def call(case: Case) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(F, "linear", changed)
            return calls.torch_chain(case)

    rounding = SimpleNamespace(of=lambda dtype, _, k: Rounding.of(dtype, "tf32", k))
    monkeypatch.setattr(checking, "Rounding", rounding)
    monkeypatch.setattr(checking, "our_call", call)
    return check(config, "cpu").verdict


def rounded(grad: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    noise = torch.rand(grad.shape, generator=generator) * 2 - 1
    return grad * (1 + 2.0**-11 * noise)


def without_a_row(grad: Tensor) -> Tensor:
    return grad.index_fill(0, torch.tensor([5]), 0.0)


def test_float64_keeps_a_tensor_where_the_call_has_it() -> None:
    """A gradient of an operand on the CPU is there, whatever the call's device."""
    case = make_case(ON_CPU, torch.device("cpu"))
    elsewhere = replace(case, device=torch.device("meta"))
    assert {t.device.type for t in elsewhere.wide().tensors.values()} == {"cpu"}


@pytest.mark.cuda
def test_an_operand_on_the_cpu_has_a_gradient(cuda: torch.device) -> None:
    outcome = check(ON_CPU, cuda)
    assert outcome.verdict == "correct", outcome


def test_rounding_of_terms_that_cancel_is_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, EQUAL_ROWS, rounded) == "correct"


@pytest.mark.parametrize("config", [EQUAL_ROWS, ON_CPU], ids=["cancels", "does not"])
def test_a_row_left_out_of_the_sum_is_wrong(
    config: LinearConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judged(monkeypatch, config, without_a_row) == "wrong"


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (0,)])
def test_every_gradient_has_a_typical_error(leading: tuple[int, ...]) -> None:
    out = (*leading, 7)
    steps = [TensorRecipe(shape) for shape in ((), (7,), (1,), out)]
    config = LinearConfig(
        seed=1,
        x=TensorRecipe((*leading, 6)),
        weight=TensorRecipe((7, 6)),
        bias=TensorRecipe((7,)),
        program=tuple(StepRecipe("mul", operand=step) for step in steps),
    )
    config = replace(config, backward=config.names())
    case = make_case(config, torch.device("cpu")).wide()
    rounding = Rounding.of(torch.float32, "ieee", 6)
    found = typical_errors(case, torch.ones(out, dtype=torch.float64), rounding)
    calls.torch_chain(leaves := case.leaves()).sum().backward()
    for name in config.names():
        exact = leaves.tensors[name].grad
        assert found[name].shape == exact.shape
        assert bool((found[name] >= rounding.floor * exact.abs() * (1 - 1e-9)).all())
