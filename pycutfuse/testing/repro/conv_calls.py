"""Calls of the convolution family."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycutfuse import config as settings
from pycutfuse import nn as modules
from pycutfuse import ops, support
from pycutfuse._loader import native
from pycutfuse.geometry import memory_format
from pycutfuse.ops import _conv_call, _conv_launch
from pycutfuse.ops._conv import prepare_conv2d, prepare_conv_transpose2d
from pycutfuse.program import encode
from pycutfuse.testing import forced_conv_policy
from pycutfuse.testing.forcing import conv_kinds_of
from pycutfuse.testing.repro.case import Case
from pycutfuse.testing.repro.conv import ConvConfig, both
from pycutfuse.testing.repro.envelope import RANGE, Envelope, Rounding
from pycutfuse.testing.repro.steps import build
from pycutfuse.testing.repro.taps import Differentiable

# x has one scale for a patch of an image, which is taken over while its largest value stays in
# fp16's range: at least 2^8 where there are two planes, 2^4 where there is one. So, by the floor of
# the tier, what is rounded off a value, relative to the patch's largest.
_PATCH_RANGES = {2.0**-22: 2.0**-33, 2.0**-10: 2.0**-29}


_convolve: Callable[..., Tensor] = Differentiable.apply


def _config(case: Case) -> ConvConfig:
    assert isinstance(case.config, ConvConfig)
    return case.config


def _arguments(case: Case) -> dict[str, Any]:
    """Settings of the functional operators."""
    config = _config(case)
    names = ["stride", "padding", "dilation", "groups"]
    names += ["output_padding"] * config.transposed
    return {name: getattr(config, name) for name in names} | case.settings


def _padded(case: Case, x: Tensor) -> Tensor:
    """x as a module with another padding mode than "zeros" pads it."""
    config = _config(case)
    above, left = both(config.padding)
    return F.pad(x, [left, left, above, above], mode=config.padding_mode)


def _batched(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 4 else tensor.unsqueeze(0)


def _three(tensor: Tensor) -> Tensor:
    """Of which sums of products are the value, the bound, and the squares of an envelope."""
    return torch.stack((tensor, tensor.abs(), tensor.square()))


class ConvCalls:
    """An `Operator`."""

    norm_dims = 4
    torch_is_definite = False  # cuDNN may transform the image

    def product(self, case: Case) -> Tensor:
        """The convolution of float64 tensors by `Taps`."""
        config = _config(case)
        x, weight = case.tensors["x"], case.tensors["weight"]
        if config.padding_mode != "zeros":
            x = _padded(case, x)
        made = _convolve(_batched(x), weight, config.taps, config.size)
        return made if x.dim() == 4 else made.squeeze(0)

    def contract(self, case: Case) -> Tensor:
        """torch's convolution."""
        if case.exact:
            product, aligned = self.product(case), case.aligned("bias")
            return product if aligned is None else product + aligned
        x, weight, bias = case.tensors["x"], case.tensors["weight"], case.tensors.get("bias")
        arguments = _arguments(case)
        if _config(case).padding_mode != "zeros":
            x, arguments["padding"] = _padded(case, x), 0
        function: Any = F.conv_transpose2d if _config(case).transposed else F.conv2d
        result: Tensor = function(x, weight, bias, **arguments)
        return result

    def envelope(self, case: Case, rounding: Rounding) -> Envelope:
        """Of the convolution; what is below the range of an image or of a filter is lost."""
        config, taps = _config(case), _config(case).taps
        x, weight = (case.tensors[name].detach() for name in ("x", "weight"))
        if config.padding_mode != "zeros":
            x = _padded(case, x)
        x = _batched(x)
        sums = taps.forward(_three(x), _three(weight), config.size)
        lost = (config.k + 1) * rounding.tiny + _below_range(config, x, weight, rounding)
        if len(config.x.shape) == 3:
            sums, lost = sums.squeeze(1), lost.squeeze(0)
        return Envelope.of_sums(sums.unbind(0), lost, rounding)

    def gradient_error(self, name: str, case: Case, terms: Tensor, rounding: Rounding) -> Tensor:
        """Both gradients are convolutions."""
        taps = _config(case).taps
        x, weight = (case.tensors[key].detach() for key in ("x", "weight"))
        grad = _three(_batched(terms))
        if name == "x":
            size = x.shape[-2], x.shape[-1]
            sums = taps.of_input(grad, _three(weight), size).reshape(3, *x.shape)
        else:
            sums = taps.of_weight(grad, _three(_batched(x)))
        return Envelope.of_sums(sums.unbind(0), rounding.tiny, rounding).typical

    def functional(self, case: Case, program: list[Any], after: list[Any]) -> Any:
        """conv2d, conv_transpose2d or conv2d_batch_norm."""
        tensors = case.tensors
        arguments = (tensors["x"], tensors["weight"], tensors.get("bias"))
        options = _arguments(case) | {"epilogue": program, "precision": case.precision}
        function: Any = ops.conv_transpose2d if _config(case).transposed else ops.conv2d
        if case.statistics is not None:
            function = ops.conv2d_batch_norm
            options |= case.norm_arguments() | {"after": after}
        return function(*arguments, **options)

    def module(self, case: Case, program: list[Any], after: list[Any]) -> nn.Module:
        """Conv2d, ConvTranspose2d or Conv2dBatchNorm2dScale."""
        config, s = _config(case), case.statistics
        sizes = (config.x.shape[-3], config.n, config.kernel)
        options = _arguments(case) | {"bias": config.bias is not None, "device": case.device}
        options |= {"dtype": getattr(torch, config.weight.dtype), "precision": case.precision}
        options["padding_mode"] = config.padding_mode
        if config.sized:
            options["output_padding"] = 0
        if s is None:
            kind: Any = modules.ConvTranspose2d if config.transposed else modules.Conv2d
            layer: Any = kind(*sizes, **options, epilogue=program)
            inner = layer
        else:
            first = config.after[0]
            scale = case.tensors["after0"] if first.operand is not None else first.constants[0]
            if "after0" in config.backward:
                scale = case.parameter("after0")
            layer = modules.Conv2dBatchNorm2dScale(*sizes, scale, **options, epilogue=after[1:])
            layer.bn, inner = case.norm_module(nn.BatchNorm2d), layer.conv
        inner.weight, inner.bias = case.parameter("weight"), case.parameter("bias")
        made: nn.Module = layer.train(s is not None and s.training)
        return made

    def run_module(self, case: Case, module: nn.Module) -> Any:
        """With the output's size where the configuration says so."""
        config = _config(case)
        given = ([*config.size],) if config.sized else ()
        return module(case.tensors["x"], *given)

    def forced(self, case: Case) -> AbstractContextManager[None]:
        """A policy of any mechanism that can plan the call."""
        policy = _policy(case)
        return nullcontext() if policy is None else forced_conv_policy(policy)


def _below_range(config: ConvConfig, x: Tensor, weight: Tensor, rounding: Rounding) -> Tensor:
    """What the scales of x and weight may take from a result, (N, K, 1, 1); both in float64."""
    if x.numel() == 0:  # which has no largest value
        return x.new_zeros(())
    groups = config.groups
    small = torch.unflatten(x.abs().nan_to_num(0.0, 0.0, 0.0), 1, (groups, -1))
    wide = torch.unflatten(weight.abs().nan_to_num(0.0, 0.0, 0.0), 0, (groups, -1))
    if config.transposed:
        wide = wide.transpose(1, 2)  # (groups, K / groups, C / groups, R, S)
    of_image = small.flatten(2).amax(2)[:, :, None]  # (N, groups, 1)
    filters = wide.flatten(2)
    of_x = _PATCH_RANGES.get(rounding.floor, RANGE) * filters.sum(2)
    of_weight = RANGE * config.k * filters.amax(2)
    lost: Tensor = (of_image * (of_x + of_weight)).flatten(1)
    return lost[..., None, None]


def _policy(case: Case) -> Any:
    """The policy that the configuration names, of those that can plan the call; None without any.

    They are counted by mechanism first, as some have many policies and others few. torch's flags
    are already those of the configuration.
    """
    number, found = _config(case).policy, _policies(case)
    if number is None or not found:
        return None
    chosen = list(found.values())[number % len(found)]
    return chosen[number // len(found) % len(chosen)]


def _policies(case: Case) -> dict[str, list[Any]]:
    """Policies that can plan the call, by mechanism."""
    config, binding = _config(case), native().binding
    if config.policy is None or config.padding_mode != "zeros":
        return {}
    if support.device_problem(torch.empty(0, device=case.device).get_device()) is not None:
        return {}
    prepare: Any = prepare_conv_transpose2d if config.transposed else prepare_conv2d
    tensors = [case.tensors.get(name) for name in ("x", "weight", "bias")]
    try:
        tier = settings.resolve_conv_tier(config.precision or "default")
        program, after = ([build(*one) for one in case.steps(word)] for word in ("step", "after"))
        call = prepare(*tensors, **_arguments(case), epilogue=program)
        shape = _conv_call.check(call)  # first: what follows reads sizes and strides
        last = memory_format(call.x, call.weight, call.geometry) is torch.channels_last
        problem = _conv_launch._problem(call, shape, tier, last)
        problem = problem._replace(tail=config.tail_name, after=encode(after))
    except (TypeError, ValueError, RuntimeError, KeyError):
        return {}
    if 0 in shape:
        return {}
    found: dict[str, list[Any]] = {}
    for policy in _compiled(binding):
        if (problem.dtype, problem.tier) in conv_kinds_of(policy):
            try:
                plan = support.make_conv_plan(problem, policy)
            except (KeyError, ValueError, RuntimeError, NotImplementedError):
                continue
            found.setdefault(support.conv_mechanism(plan), []).append(policy)
    return found


def _compiled(binding: Any) -> list[Any]:
    """Every compiled policy, and those that name a mechanism alone, of kernels of linear layers."""
    found = list(getattr(binding, "compiled_conv_policies", list)())
    if not found or not hasattr(binding, "ConvPolicy"):
        return found
    found += [binding.ConvPolicy(0, gemm=gemm) for gemm in binding.compiled_policies()]
    others = [binding.GemmPolicy(0, 0, source=source) for source in (0, 1, 2)]
    return [*found, *(binding.ConvPolicy(0, gemm=gemm) for gemm in others)]
