"""Calls of the linear family."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycutfuse import config as settings
from pycutfuse import nn as modules
from pycutfuse import ops
from pycutfuse._loader import native
from pycutfuse.ops._layout import padded
from pycutfuse.program import EMPTY
from pycutfuse.support import Problem, make_plan
from pycutfuse.testing import forced_policy, kinds_of, small_policies, turned_policy
from pycutfuse.testing.repro.case import Case
from pycutfuse.testing.repro.config import Config
from pycutfuse.testing.repro.envelope import Envelope, Rounding
from pycutfuse.testing.repro.tails import LogSumExp


class LinearCalls:
    """An `Operator`."""

    norm_dims = 2
    torch_is_definite = True

    def product(self, case: Case) -> Tensor:
        """x @ weight.T."""
        return F.linear(case.tensors["x"], case.tensors["weight"])

    def contract(self, case: Case) -> Tensor:
        """torch's linear."""
        tensors = case.tensors
        return F.linear(tensors["x"], tensors["weight"], tensors.get("bias"))

    def envelope(self, case: Case, rounding: Rounding) -> Envelope:
        """Of x @ weight.T."""
        x, weight = (case.tensors[name].detach() for name in ("x", "weight"))
        return Envelope.contraction(x, weight, rounding)

    def gradient_error(self, name: str, case: Case, terms: Tensor, rounding: Rounding) -> Tensor:
        """Both gradients are contractions."""
        x, weight = (case.tensors[key].detach() for key in ("x", "weight"))
        m, (n, k) = math.prod(x.shape[:-1]), weight.shape
        rows = terms.reshape(m, n)
        if name == "x":
            return Envelope.contraction(rows, weight.mT, rounding).typical.reshape(x.shape)
        return Envelope.contraction(rows.mT, x.reshape(m, k).mT, rounding).typical

    def functional(self, case: Case, program: list[Any], after: list[Any]) -> Any:
        """linear or linear_batch_norm."""
        tensors = case.tensors
        arguments = (tensors["x"], tensors["weight"], tensors.get("bias"))
        options = {"epilogue": program, "precision": case.precision}
        function: Any = ops.linear
        if case.statistics is not None:
            function = ops.linear_batch_norm
            options |= case.norm_arguments() | {"after": after}
        return function(*arguments, **options)

    def module(self, case: Case, program: list[Any], after: list[Any]) -> nn.Module:
        """Linear, LinearLogSumExp or LinearScaleBatchNorm1d."""
        config, s = case.config, case.statistics
        options = {"device": case.device, "precision": case.precision}
        if s is not None:
            shape = case.tensors["step0"].shape
            made = modules.LinearScaleBatchNorm1d(1, 1, shape, epilogue=after, **options)
            made.gemm.weight, made.gemm.bias = case.parameter("weight"), case.parameter("bias")
            made.scale = case.parameter("step0")
            made.bn = case.norm_module(nn.BatchNorm1d)
            return made.train(s.training)
        kind: Any = modules.Linear
        if isinstance(config.tail, LogSumExp):
            kind = modules.LinearLogSumExp
        options |= {"dtype": getattr(torch, config.weight.dtype), "epilogue": program}
        layer: nn.Module = kind(config.k, config.n, config.bias is not None, **options)
        layer.weight = case.parameter("weight")
        if config.bias is not None:
            layer.bias = case.parameter("bias")
        return layer.eval()

    def run_module(self, case: Case, module: nn.Module) -> Any:
        """Its only argument is x."""
        return module(case.tensors["x"])

    def forced(self, case: Case) -> AbstractContextManager[None]:
        """One of ``_C.compiled_policies()``, `small_policies` or `turned_policy`."""
        policy = _policy(case.config)
        return nullcontext() if policy is None else forced_policy(policy)


def _policy(config: Config) -> Any:
    """The compiled policy that `config` forces, None if none multiplies its dtype at its tier.

    Or if the policy cannot plan the problem. torch's flags are already those of `config`.
    """
    binding = native().binding
    if config.policy is None or binding is None or not torch.cuda.is_available():
        return None
    dtype = getattr(torch, config.x.dtype)
    narrow = dtype is not torch.float32
    tier = "ieee" if narrow else settings.resolve_tier(config.precision or "default")
    every = [*binding.compiled_policies(), *small_policies()]
    steps = {step.name for step in (*config.program, *config.after)}
    if not config.frozen and steps <= {"add", "sub", "mul"}:
        every += [turned_policy(dtype=of) for of in (torch.float32, torch.float16, torch.bfloat16)]
    policies = [p for p in every if (dtype, tier) in kinds_of(p)]
    if not policies:
        return None
    policy = policies[config.policy % len(policies)]
    m, n, k = math.prod(config.x.shape[:-1]), config.n, config.k
    products = [(m, n, k, config.tail_name)]
    if config.backward:
        products += [(m, k, n, "none"), (n, k, m, "none")]
    frozen = config.frozen and not narrow
    try:
        for rows, columns, terms, tail in products:
            leading = (padded(terms),) * 2 if narrow else (0, 0)
            head = (rows, columns, terms, EMPTY, tail, EMPTY, tier, dtype)
            make_plan(Problem(*head, frozen, *leading, torch.cuda.current_device()), policy)
    except (ValueError, RuntimeError, NotImplementedError):
        return None
    return policy
