"""One configuration as tensors; our call with them, and the same chain as torch users have it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycutfuse import config as settings
from pycutfuse import nn as modules
from pycutfuse import ops
from pycutfuse._loader import native
from pycutfuse.freezing import freeze
from pycutfuse.ops._layout import padded
from pycutfuse.program import EMPTY
from pycutfuse.support import Problem, make_plan
from pycutfuse.testing import exact_promotion, forced_policy, guarded, kinds_of, slow_problems_taken
from pycutfuse.testing.repro.envelope import Envelope, Rounding
from pycutfuse.testing.repro.linear import LinearConfig
from pycutfuse.testing.repro.steps import STEPS, StepRecipe, build
from pycutfuse.testing.repro.tails import (
    BatchNorm,
    LogSumExp,
    Statistics,
    batch_norm,
    batch_norm_envelope,
    logsumexp_envelope,
)

Tensors = dict[str, Any]


@dataclass
class Case:
    """Tensors by the names of `LinearConfig.names`, and what a mistake has changed."""

    config: LinearConfig
    device: torch.device
    tensors: Tensors
    statistics: Statistics | None
    precision: Any = None
    wrong_step: Callable[[], Any] | None = None  # appended to our program
    torch_step: Callable[[Tensor], Any] | None = None  # and to torch's
    freeze_training: bool = False
    instead: tuple[Callable[[], Any], Callable[[], Any]] | None = None  # of the whole call
    problems: list[str] = field(default_factory=list)

    def with_tensors(self, tensors: Tensors, statistics: Statistics | None) -> Case:
        """The same call of other tensors."""
        if statistics is not None:
            weight, bias = tensors.get("bn_weight"), tensors.get("bn_bias")
            statistics = replace(statistics, weight=weight, bias=bias)
        return replace(self, tensors=tensors, statistics=statistics)

    def leaves(self) -> Case:
        """Fresh leaves of autograd and running statistics, to be used by one call."""
        wanted = self.config.backward
        found = {
            name: tensor.detach().requires_grad_(name in wanted)
            if isinstance(tensor, Tensor)
            else tensor
            for name, tensor in self.tensors.items()
        }
        return self.with_tensors(found, self.statistics and self.statistics.copy())

    def converted(self, change: Callable[[Tensor], Tensor]) -> Case:
        """Its tensors changed by a function, its statistics copied."""
        found = {name: change(tensor).detach() for name, tensor in self.tensors.items()}
        return self.with_tensors(found, self.statistics and self.statistics.copy()).leaves()

    def wide(self) -> Case:
        """All of it in float64, each tensor on its own device."""
        found = {name: tensor.detach().double() for name, tensor in self.tensors.items()}
        statistics = self.statistics and self.statistics.copy(torch.float64)
        return self.with_tensors(found, statistics).leaves()

    def steps(self, word: str) -> list[tuple[StepRecipe, Any]]:
        """Steps of ``step`` or ``after`` with their operands."""
        recipes = self.config.program if word == "step" else self.config.after
        return [(step, self.tensors.get(f"{word}{at}")) for at, step in enumerate(recipes)]


def make_case(config: LinearConfig, device: torch.device) -> Case:
    """Draw the tensors of `config`, its mistake not yet made."""
    recipes = {"x": config.x, "weight": config.weight}
    if config.bias is not None:
        recipes["bias"] = config.bias
    for word, steps in (("step", config.program), ("after", config.after)):
        for at, step in enumerate(steps):
            if step.operand is not None:
                recipes[f"{word}{at}"] = step.operand
    tensors: Tensors = {
        name: recipe.make(64 * config.seed + at, device)
        for at, (name, recipe) in enumerate(recipes.items())
    }
    statistics = None
    if isinstance(config.tail, BatchNorm):
        statistics = config.tail.make(config.n, 64 * config.seed + 50, device)
        if config.tail.affine:
            tensors |= {"bn_weight": statistics.weight, "bn_bias": statistics.bias}
    return Case(config, device, tensors, statistics, config.precision)


def torch_chain(case: Case) -> Any:
    """The chain in plain torch."""
    if case.instead is not None:
        return case.instead[1]()
    tensors = case.tensors
    value = F.linear(tensors["x"], tensors["weight"], tensors.get("bias"))
    for recipe, operand in case.steps("step"):
        value = plain_step(value, recipe, operand)
    if case.torch_step is not None:
        value = case.torch_step(value)
    if case.statistics is not None:
        if value.dim() != 2:
            raise ValueError(f"expected 2D or 3D input (got {value.dim()}D input)")
        value = batch_norm(value, case.statistics)
        for recipe, operand in case.steps("after"):
            value = plain_step(value, recipe, operand)
    elif isinstance(case.config.tail, LogSumExp):
        value = value.logsumexp(-1)
    return value


def plain_step(value: Tensor, recipe: StepRecipe, operand: Any) -> Tensor:
    """A step in plain torch."""
    constants = recipe.constants
    other = operand if operand is not None else (constants[0] if constants else None)
    return STEPS[recipe.name].plain(value, other, constants)


def walk_chain(case: Case, rounding: Rounding) -> tuple[Envelope, dict[str, Any]]:
    """Envelope of the result of `case`, which is in float64, and of its running statistics."""
    tensors = {name: tensor.detach() for name, tensor in case.tensors.items()}
    walk = Envelope.contraction(tensors["x"], tensors["weight"], rounding)
    if "bias" in tensors:
        walk.step(StepRecipe("add"), tensors["bias"])
    for recipe, operand in case.steps("step"):
        walk.step(recipe, None if operand is None else operand.detach())
    running: dict[str, Any] = {}
    if case.statistics is not None:
        running = batch_norm_envelope(walk, case.statistics)
        for recipe, operand in case.steps("after"):
            walk.step(recipe, None if operand is None else operand.detach())
    elif isinstance(case.config.tail, LogSumExp):
        logsumexp_envelope(walk)
    return walk, running


def our_call(case: Case) -> Any:
    """The call that is tested."""
    if case.instead is not None:
        return case.instead[0]()
    program = [build(recipe, operand) for recipe, operand in case.steps("step")]
    after = [build(recipe, operand) for recipe, operand in case.steps("after")]
    if case.wrong_step is not None:
        program.append(case.wrong_step())
    if case.config.call == "ops":
        return _functional(case, program, after)
    layer = _module(case, program, after)
    if case.freeze_training:
        freeze(layer.train())
    elif case.config.frozen:
        freeze(layer)
    return layer(case.tensors["x"])


def _functional(case: Case, program: list[Any], after: list[Any]) -> Any:
    tensors, s = case.tensors, case.statistics
    arguments = (tensors["x"], tensors["weight"], tensors.get("bias"))
    if s is None:
        return ops.linear(*arguments, epilogue=program, precision=case.precision)
    return ops.linear_batch_norm(
        *arguments,
        epilogue=program,
        running_mean=s.mean,
        running_var=s.var,
        num_batches_tracked=s.count,
        bn_weight=s.weight,
        bn_bias=s.bias,
        training=s.training,
        momentum=s.momentum,
        eps=s.eps,
        after=after,
        precision=case.precision,
    )


def _parameter(case: Case, name: str) -> Any:
    """The tensor as a Parameter, by which its gradient is found afterwards."""
    tensor = case.tensors.get(name)
    if isinstance(tensor, Tensor) and tensor.is_floating_point():
        case.tensors[name] = nn.Parameter(tensor.detach(), name in case.config.backward)
        return case.tensors[name]
    return tensor


def _module(case: Case, program: list[Any], after: list[Any]) -> nn.Module:
    config, s = case.config, case.statistics
    dtype = getattr(torch, config.weight.dtype)
    if s is not None:
        scale = case.tensors["step0"]
        made = modules.LinearScaleBatchNorm1d(
            1, 1, scale.shape, device=case.device, epilogue=after, precision=case.precision
        )
        made.gemm.weight, made.gemm.bias = _parameter(case, "weight"), _parameter(case, "bias")
        made.scale = _parameter(case, "step0")
        made.bn = bn = nn.BatchNorm1d(
            config.n,
            s.eps,
            s.momentum,
            affine=s.weight is not None,
            track_running_stats=s.mean is not None,
            device=case.device,
        )
        bn.weight, bn.bias = _parameter(case, "bn_weight"), _parameter(case, "bn_bias")
        bn.running_mean, bn.running_var, bn.num_batches_tracked = s.mean, s.var, s.count
        made.train(s.training)
        return made
    kind: Any = modules.Linear
    if isinstance(config.tail, LogSumExp):
        kind = modules.LinearLogSumExp
    options = {"device": case.device, "dtype": dtype, "precision": case.precision}
    layer: Any = kind(config.k, config.n, config.bias is not None, epilogue=program, **options)
    layer.weight = _parameter(case, "weight")
    if config.bias is not None:
        layer.bias = _parameter(case, "bias")
    layer.eval()
    return layer  # type: ignore[no-any-return]


def _tail(config: LinearConfig) -> str:
    """The tail by its name in a `Problem`."""
    if isinstance(config.tail, BatchNorm):
        return "batch_norm_train" if config.tail.training else "batch_norm_eval"
    return "none" if config.tail is None else "logsumexp"


def _policy(config: LinearConfig) -> Any:
    """The compiled policy that `config` forces, None if none multiplies its dtype at its tier.

    Or if the policy cannot plan the problem. torch's flags are already those of `config`.
    """
    binding = native().binding
    if config.policy is None or binding is None or not torch.cuda.is_available():
        return None
    dtype = getattr(torch, config.x.dtype)
    narrow = dtype is not torch.float32
    tier = "ieee" if narrow else settings.resolve_tier(config.precision or "default")
    policies = [p for p in binding.compiled_policies() if (dtype, tier) in kinds_of(p)]
    if not policies:
        return None
    policy = policies[config.policy % len(policies)]
    sizes = (math.prod(config.x.shape[:-1]), config.n, config.k)
    leading = (padded(config.k),) * 2 if narrow else (0, 0)
    try:
        head = (*sizes, EMPTY, _tail(config), EMPTY, tier, dtype)
        make_plan(Problem(*head, False, *leading, torch.cuda.current_device()), policy)
    except (ValueError, RuntimeError, NotImplementedError):
        return None
    return policy


@contextmanager
def surroundings(config: LinearConfig) -> Iterator[None]:
    """Guards, a forced policy, slow problems and the exact promotion, as `config` asks."""
    with ExitStack() as stack:
        if not config.hands_over:
            stack.enter_context(slow_problems_taken())
        policy = _policy(config)
        if policy is not None:
            stack.enter_context(forced_policy(policy))
        if config.integers:
            stack.enter_context(exact_promotion())
        if config.guarded:
            stack.enter_context(guarded())
        yield


@contextmanager
def flags(allow_tf32: bool) -> Iterator[None]:
    """torch's flag of float32 products, and silence."""
    outer = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = outer
