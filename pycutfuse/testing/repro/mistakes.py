"""Invalid calls: what is wrong with each, and which exception is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycutfuse import nn as modules
from pycutfuse import ops
from pycutfuse import program as pcf
from pycutfuse.program import MAX_STEPS
from pycutfuse.testing.repro.case import Case
from pycutfuse.testing.repro.config import Config
from pycutfuse.testing.repro.tails import BatchNorm, LogSumExp


@dataclass(frozen=True)
class Mistake:
    """`make` spoils a case; `error` is the documented exception, None for whatever torch raises."""

    make: Callable[[Case], None]
    error: type[Exception] | None = None
    fits: Callable[[Config], bool] = lambda config: True


def of_tensor(name: str, change: Callable[[Tensor], Any]) -> Callable[[Case], None]:
    """Change one tensor."""

    def make(case: Case) -> None:
        case.tensors[name] = change(case.tensors[name])

    return make


def _wrong_step(
    ours: Callable[[Case], Any], theirs: Callable[[Tensor], Any] | None = None
) -> Callable[[Case], None]:
    def make(case: Case) -> None:
        case.wrong_step = lambda: ours(case)
        case.torch_step = theirs

    return make


def ones(case: Case, *shape: int) -> Tensor:
    """On the case's device."""
    return torch.ones(shape, device=case.device)


def _statistic(name: str, value: Callable[[Case], Any]) -> Callable[[Case], None]:
    def make(case: Case) -> None:
        setattr(case.statistics, name, value(case))
        if name in ("weight", "bias"):
            case.tensors[f"bn_{name}"] = value(case)

    return make


def _other_device(case: Case) -> None:
    if case.device.type != "cpu":
        case.tensors["x"] = case.tensors["x"].cpu()


def attribute(name: str, value: Any) -> Callable[[Case], None]:
    """Set an attribute of the case."""
    return lambda case: setattr(case, name, value)


def _normed(config: Config) -> bool:
    return isinstance(config.tail, BatchNorm)


def _functional_norm(config: Config) -> bool:
    return _normed(config) and config.call == "ops"


def is_training(config: Config) -> bool:
    """Whether there is a batch norm that uses the batch's statistics."""
    return isinstance(config.tail, BatchNorm) and config.tail.training


def _evaluation(config: Config) -> bool:
    return _functional_norm(config) and not is_training(config)


def _tracked(config: Config) -> bool:
    return isinstance(config.tail, BatchNorm) and config.tail.track and config.call == "ops"


def _affine(config: Config) -> bool:
    return isinstance(config.tail, BatchNorm) and config.tail.affine and config.call == "ops"


def _free_program(config: Config) -> bool:
    return not (_normed(config) and config.call == "module")


def _plain(config: Config) -> bool:
    return config.tail is None and config.call == "ops"


def _logsumexp_module(config: Config) -> bool:
    return isinstance(config.tail, LogSumExp) or (config.tail is None and config.call == "module")


def _grow(case: Case) -> Any:
    return pcf.add(ones(case, 2, *case.config.value_shape))


def _longer(case: Case) -> Any:
    return pcf.mul(ones(case, case.config.n + 2, *(1,) * case.config.pixel_dims))


def too_many(operator: Callable[..., Any]) -> Callable[[Case], None]:
    """A program of 17 steps for a functional operator."""

    def call(case: Case) -> Any:
        steps = [pcf.relu()] * (MAX_STEPS + 1)
        return operator(case.tensors["x"], case.tensors["weight"], epilogue=steps)

    return attribute("instead", (call, call))


_F32_ONLY: Callable[[Config], bool] = lambda c: c.x.dtype == "float32"  # noqa: E731

MISTAKES: dict[str, Mistake] = {
    "x_features": Mistake(of_tensor("x", lambda x: x.new_ones((*x.shape[:-1], x.shape[-1] + 1)))),
    "x_scalar": Mistake(of_tensor("x", lambda x: x.new_ones(()))),
    "x_list": Mistake(of_tensor("x", lambda x: [1.0])),
    "x_none": Mistake(of_tensor("x", lambda x: None)),
    "x_integer": Mistake(of_tensor("x", lambda x: x.new_ones(x.shape, dtype=torch.int64))),
    "x_complex": Mistake(of_tensor("x", lambda x: x.new_ones(x.shape, dtype=torch.complex64))),
    "x_double": Mistake(of_tensor("x", Tensor.double), fits=_F32_ONLY),
    "x_half": Mistake(of_tensor("x", Tensor.half), fits=_F32_ONLY),
    "x_on_cpu": Mistake(_other_device),
    "weight_3d": Mistake(of_tensor("weight", lambda w: w[None]), fits=lambda c: c.call == "ops"),
    "weight_none": Mistake(of_tensor("weight", lambda w: None), fits=lambda c: c.call == "ops"),
    "bias_size": Mistake(
        of_tensor("bias", lambda b: b.new_ones(b.shape[0] + 2)),
        fits=lambda c: c.bias is not None and c.call == "ops",
    ),
    # PyTorch's linear takes it where x has three dimensions or more and is not contiguous.
    "bias_dtype": Mistake(
        of_tensor("bias", Tensor.double),
        RuntimeError,
        fits=lambda c: c.bias is not None and c.bias.dtype != "float64" and c.call == "ops",
    ),
    "bias_number": Mistake(
        of_tensor("bias", lambda b: 1.0), fits=lambda c: c.bias is not None and c.call == "ops"
    ),
    "operand_size": Mistake(_wrong_step(_longer), RuntimeError, _free_program),
    "operand_grows": Mistake(_wrong_step(_grow), RuntimeError, _free_program),
    "step_word": Mistake(_wrong_step(lambda c: "relu"), TypeError, _free_program),
    "step_function": Mistake(_wrong_step(lambda c: pcf.relu), TypeError, _free_program),
    "constant_word": Mistake(
        _wrong_step(lambda c: pcf.add("one"), lambda v: v + "one"),  # type: ignore[arg-type,operator]
        fits=_free_program,
    ),
    "constant_bool": Mistake(_wrong_step(lambda c: pcf.mul(True)), TypeError, _free_program),
    "bound_nan": Mistake(
        _wrong_step(lambda c: pcf.minimum(float("nan"))), ValueError, _free_program
    ),
    "gelu_mode": Mistake(
        _wrong_step(lambda c: pcf.gelu(approximate="erf"), lambda v: F.gelu(v, approximate="erf")),
        fits=_free_program,
    ),
    "clamp_nothing": Mistake(
        _wrong_step(lambda c: pcf.clamp(), lambda v: v.clamp()), fits=_free_program
    ),
    "hardtanh_order": Mistake(
        _wrong_step(lambda c: pcf.hardtanh(2.0, 1.0), lambda v: F.hardtanh(v, 2.0, 1.0)),
        fits=_free_program,
    ),
    "too_many_steps": Mistake(too_many(ops.linear), ValueError, _plain),
    "precision": Mistake(attribute("precision", "fp32"), ValueError),
    "negative_features": Mistake(
        attribute("instead", (lambda c: modules.Linear(-1, 2), lambda c: nn.Linear(-1, 2))),
        fits=_logsumexp_module,
    ),
    "freeze_training": Mistake(
        attribute("freeze_training", True), RuntimeError, lambda c: c.call == "module"
    ),
    "one_row": Mistake(
        of_tensor("x", lambda x: x.new_ones(1, x.shape[-1])),
        fits=lambda c: is_training(c) and c.n > 0 and not has_full_operands(c),
    ),
    "x_1d": Mistake(
        of_tensor("x", lambda x: x.new_ones(x.shape[-1])), ValueError, _functional_norm
    ),
    "x_3d": Mistake(
        of_tensor("x", lambda x: x.new_ones(2, *x.shape)), ValueError, _functional_norm
    ),
    "no_statistics": Mistake(
        _statistic("mean", lambda c: None), fits=lambda c: _evaluation(c) and 0 not in c.value_shape
    ),
    "running_size": Mistake(
        _statistic("var", lambda c: ones(c, c.config.n + 2)), RuntimeError, _tracked
    ),
    "bn_weight_size": Mistake(
        _statistic("weight", lambda c: ones(c, c.config.n + 2)), RuntimeError, _affine
    ),
    "momentum_word": Mistake(_statistic("momentum", lambda c: "0.1"), fits=is_training),
    "momentum_negative": Mistake(
        _statistic("momentum", lambda c: -0.5), ValueError, _functional_norm
    ),
    "eps_word": Mistake(_statistic("eps", lambda c: "small"), fits=_normed),
    "eps_none": Mistake(_statistic("eps", lambda c: None), fits=_normed),
}


def has_full_operands(config: Config) -> bool:
    """Whether a step is bound to the number of rows, so that another x is wrong by itself."""
    operands = [step.operand for step in (*config.program, *config.after) if step.operand]
    return any(len(operand.shape) > 1 for operand in operands)
