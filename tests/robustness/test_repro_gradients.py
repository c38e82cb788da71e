"""The fuzzer's judgement of gradients."""

from dataclasses import replace

import pytest
import torch

from pycutfuse.testing.repro import LinearConfig, StepRecipe, TensorRecipe, calls, check

ON_CPU = LinearConfig(
    seed=1,
    x=TensorRecipe((17, 65)),
    weight=TensorRecipe((9, 65)),
    program=(StepRecipe("mul", operand=TensorRecipe((), on_cpu=True)),),
    backward=("x", "weight", "step0"),
)


def test_float64_keeps_a_tensor_where_the_call_has_it() -> None:
    """A gradient of an operand on the CPU is there, whatever the call's device."""
    case = calls.make_case(ON_CPU, torch.device("cpu"))
    elsewhere = replace(case, device=torch.device("meta"))
    assert {t.device.type for t in elsewhere.wide().tensors.values()} == {"cpu"}


@pytest.mark.cuda
def test_an_operand_on_the_cpu_has_a_gradient(cuda: torch.device) -> None:
    outcome = check(ON_CPU, cuda)
    assert outcome.verdict == "correct", outcome
