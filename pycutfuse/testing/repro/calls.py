"""Our call of a case, and the same chain as torch users have it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pycutfuse.freezing import freeze
from pycutfuse.testing import exact_promotion, guarded, slow_problems_taken
from pycutfuse.testing.repro.case import Case, plain_step
from pycutfuse.testing.repro.config import Config
from pycutfuse.testing.repro.conv import ConvConfig
from pycutfuse.testing.repro.conv_calls import ConvCalls
from pycutfuse.testing.repro.conv_mistakes import MISTAKES as CONV_MISTAKES
from pycutfuse.testing.repro.envelope import Envelope, Rounding
from pycutfuse.testing.repro.linear import LinearConfig
from pycutfuse.testing.repro.linear_calls import LinearCalls
from pycutfuse.testing.repro.mistakes import MISTAKES, Mistake
from pycutfuse.testing.repro.operator import Operator
from pycutfuse.testing.repro.steps import StepRecipe, build
from pycutfuse.testing.repro.tails import (
    LogSumExp,
    batch_norm,
    batch_norm_envelope,
    logsumexp_envelope,
)

_OPERATORS: dict[type[Config], Operator] = {LinearConfig: LinearCalls(), ConvConfig: ConvCalls()}


def operator_of(config: Config) -> Operator:
    """The family's."""
    return _OPERATORS[type(config)]


def mistakes_of(config: Config) -> dict[str, Mistake]:
    """The family's."""
    return CONV_MISTAKES if isinstance(config, ConvConfig) else MISTAKES


def torch_chain(case: Case) -> Any:
    """The chain in plain torch."""
    if case.instead is not None:
        return case.instead[1](case)
    operator = operator_of(case.config)
    value = operator.contract(case)
    for recipe, operand in case.steps("step"):
        value = plain_step(value, recipe, operand)
    if case.torch_step is not None:
        value = case.torch_step(value)
    if case.statistics is not None:
        if value.dim() != operator.norm_dims:
            raise ValueError(f"expected another input than of {value.dim()} dimensions")
        value = batch_norm(value, case.statistics)
        for recipe, operand in case.steps("after"):
            value = plain_step(value, recipe, operand)
    elif isinstance(case.config.tail, LogSumExp):
        value = value.logsumexp(-1)
    return value


def walk_chain(case: Case, rounding: Rounding) -> tuple[Envelope, dict[str, Any]]:
    """Envelope of the result of `case`, which is in float64, and of its running statistics."""
    walk = operator_of(case.config).envelope(case, rounding)
    if (bias := case.aligned("bias")) is not None:
        walk.step(StepRecipe("add"), bias.detach())
    for recipe, operand in case.steps("step"):
        walk.step(recipe, None if operand is None else operand.detach())
    running: dict[str, Any] = {}
    if case.statistics is not None:
        running = batch_norm_envelope(walk, case.statistics, case.config.pixel_dims)
        for recipe, operand in case.steps("after"):
            walk.step(recipe, None if operand is None else operand.detach())
    elif isinstance(case.config.tail, LogSumExp):
        logsumexp_envelope(walk)
    return walk, running


def our_call(case: Case) -> Any:
    """The call that is tested."""
    if case.instead is not None:
        return case.instead[0](case)
    operator = operator_of(case.config)
    program = [build(recipe, operand) for recipe, operand in case.steps("step")]
    after = [build(recipe, operand) for recipe, operand in case.steps("after")]
    if case.wrong_step is not None:
        program.append(case.wrong_step())
    if case.config.call == "ops":
        return operator.functional(case, program, after)
    layer = operator.module(case, program, after)
    if case.freeze_training:
        freeze(layer.train())
    elif case.config.frozen:
        freeze(layer)
    return operator.run_module(case, layer)


@contextmanager
def surroundings(case: Case) -> Iterator[None]:
    """Guards, a forced policy, slow problems and the exact promotion, as its configuration asks."""
    config = case.config
    with ExitStack() as stack:
        if not config.hands_over:
            stack.enter_context(slow_problems_taken())
        stack.enter_context(operator_of(config).forced(case))
        if config.integers:
            stack.enter_context(exact_promotion())
        if config.guarded:
            stack.enter_context(guarded())
        yield


@contextmanager
def flags(allow_tf32: bool) -> Iterator[None]:
    """torch's flags of float32 products and convolutions, and silence."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    outer = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = allow_tf32
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = outer
