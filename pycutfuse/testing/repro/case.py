"""One configuration as tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pycutfuse.testing.repro.config import Config
from pycutfuse.testing.repro.steps import STEPS, StepRecipe
from pycutfuse.testing.repro.tails import BatchNorm, Statistics

Tensors = dict[str, Any]
OF_CHANNELS = ("bias", "bn_weight", "bn_bias")  # one value for each channel


@dataclass
class Case:
    """Tensors by the names of `Config.names`, and what a mistake has changed."""

    config: Config
    device: torch.device
    tensors: Tensors
    statistics: Statistics | None
    precision: Any = None
    wrong_step: Callable[[], Any] | None = None  # appended to our program
    torch_step: Callable[[Tensor], Any] | None = None  # and to torch's
    freeze_training: bool = False
    # Of the whole call: ours and torch's.
    instead: tuple[Callable[[Case], Any], Callable[[Case], Any]] | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # in place of the configuration's
    exact: bool = False  # float64, by the family's own sums of products where it has them

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
        return replace(self, exact=True).with_tensors(found, statistics).leaves()

    def steps(self, word: str) -> list[tuple[StepRecipe, Any]]:
        """Steps of ``step`` or ``after`` with their operands."""
        recipes = self.config.program if word == "step" else self.config.after
        return [(step, self.tensors.get(f"{word}{at}")) for at, step in enumerate(recipes)]

    def aligned(self, name: str) -> Any:
        """The tensor, or None, in a shape that broadcasts to the contraction's result."""
        tensor = self.tensors.get(name)
        if tensor is None or name not in OF_CHANNELS:
            return tensor
        return tensor.reshape(*tensor.shape, *(1,) * self.config.pixel_dims)

    def parameter(self, name: str) -> Any:
        """The tensor as a Parameter, by which its gradient is found afterwards."""
        tensor = self.tensors.get(name)
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            self.tensors[name] = nn.Parameter(tensor.detach(), name in self.config.backward)
            return self.tensors[name]
        return tensor

    def norm_arguments(self) -> dict[str, Any]:
        """Arguments of a functional operator with a batch norm, beside its tensors."""
        s = self.statistics
        assert s is not None
        return {
            "running_mean": s.mean,
            "running_var": s.var,
            "num_batches_tracked": s.count,
            "bn_weight": s.weight,
            "bn_bias": s.bias,
            "training": s.training,
            "momentum": s.momentum,
            "eps": s.eps,
        }

    def norm_module(self, kind: Callable[..., Any]) -> Any:
        """nn.BatchNorm1d or 2d with this case's tensors and numbers."""
        s = self.statistics
        assert s is not None
        options = {"affine": s.weight is not None, "track_running_stats": s.mean is not None}
        bn = kind(self.config.n, s.eps, s.momentum, **options, device=self.device)
        bn.weight, bn.bias = self.parameter("bn_weight"), self.parameter("bn_bias")
        bn.running_mean, bn.running_var, bn.num_batches_tracked = s.mean, s.var, s.count
        return bn


def make_case(config: Config, device: torch.device) -> Case:
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


def plain_step(value: Tensor, recipe: StepRecipe, operand: Any) -> Tensor:
    """A step in plain torch."""
    constants = recipe.constants
    other = operand if operand is not None else (constants[0] if constants else None)
    return STEPS[recipe.name].plain(value, other, constants)
