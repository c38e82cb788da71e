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
from pycutfuse.testing.repro.calls import Case
from pycutfuse.testing.repro.linear import LinearConfig
from pycutfuse.testing.repro.tails import BatchNorm, LogSumExp


@dataclass(frozen=True)
class Mistake:
    """`make` spoils a case; `error` is the documented exception, None for whatever torch raises."""

    make: Callable[[Case], None]
    error: type[Exception] | None = None
    fits: Callable[[LinearConfig], bool] = lambda config: True


def _tensor(name: str, change: Callable[[Tensor], Any]) -> Callable[[Case], None]:
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


def _ones(case: Case, *shape: int) -> Tensor:
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


def _attribute(name: str, value: Any) -> Callable[[Case], None]:
    return lambda case: setattr(case, name, value)


def _normed(config: LinearConfig) -> bool:
    return isinstance(config.tail, BatchNorm)


def _functional_norm(config: LinearConfig) -> bool:
    return _normed(config) and config.call == "ops"


def _training(config: LinearConfig) -> bool:
    return isinstance(config.tail, BatchNorm) and config.tail.training


def _evaluation(config: LinearConfig) -> bool:
    return _functional_norm(config) and not _training(config)


def _tracked(config: LinearConfig) -> bool:
    return isinstance(config.tail, BatchNorm) and config.tail.track and config.call == "ops"


def _affine(config: LinearConfig) -> bool:
    return isinstance(config.tail, BatchNorm) and config.tail.affine and config.call == "ops"


def _free_program(config: LinearConfig) -> bool:
    return not (_normed(config) and config.call == "module")


def _plain(config: LinearConfig) -> bool:
    return config.tail is None and config.call == "ops"


def _logsumexp_module(config: LinearConfig) -> bool:
    return isinstance(config.tail, LogSumExp) or (config.tail is None and config.call == "module")


def _grow(case: Case) -> Any:
    return pcf.add(_ones(case, 2, *case.config.value_shape))


_F32_ONLY: Callable[[LinearConfig], bool] = lambda c: c.x.dtype == "float32"  # noqa: E731

MISTAKES: dict[str, Mistake] = {
    "x_features": Mistake(_tensor("x", lambda x: x.new_ones((*x.shape[:-1], x.shape[-1] + 1)))),
    "x_scalar": Mistake(_tensor("x", lambda x: x.new_ones(()))),
    "x_list": Mistake(_tensor("x", lambda x: [1.0])),
    "x_none": Mistake(_tensor("x", lambda x: None)),
    "x_integer": Mistake(_tensor("x", lambda x: x.new_ones(x.shape, dtype=torch.int64))),
    "x_complex": Mistake(_tensor("x", lambda x: x.new_ones(x.shape, dtype=torch.complex64))),
    "x_double": Mistake(_tensor("x", Tensor.double), fits=_F32_ONLY),
    "x_half": Mistake(_tensor("x", Tensor.half), fits=_F32_ONLY),
    "x_on_cpu": Mistake(_other_device),
    "weight_3d": Mistake(_tensor("weight", lambda w: w[None]), fits=lambda c: c.call == "ops"),
    "weight_none": Mistake(_tensor("weight", lambda w: None), fits=lambda c: c.call == "ops"),
    "bias_size": Mistake(
        _tensor("bias", lambda b: b.new_ones(b.shape[0] + 2)),
        fits=lambda c: c.bias is not None and c.call == "ops",
    ),
    "bias_dtype": Mistake(
        _tensor("bias", Tensor.double),
        fits=lambda c: c.bias is not None and c.bias.dtype != "float64" and c.call == "ops",
    ),
    "bias_number": Mistake(
        _tensor("bias", lambda b: 1.0), fits=lambda c: c.bias is not None and c.call == "ops"
    ),
    "operand_size": Mistake(
        _wrong_step(lambda c: pcf.mul(_ones(c, c.config.n + 2))), RuntimeError, _free_program
    ),
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
    "too_many_steps": Mistake(_attribute("instead", None), ValueError, _plain),
    "precision": Mistake(_attribute("precision", "fp32"), ValueError),
    "negative_features": Mistake(
        _attribute("instead", (lambda: modules.Linear(-1, 2), lambda: nn.Linear(-1, 2))),
        fits=_logsumexp_module,
    ),
    "freeze_training": Mistake(
        _attribute("freeze_training", True), RuntimeError, lambda c: c.call == "module"
    ),
    "one_row": Mistake(
        _tensor("x", lambda x: x.new_ones(1, x.shape[-1])),
        fits=lambda c: _training(c) and c.n > 0 and not _full_operands(c),
    ),
    "x_1d": Mistake(_tensor("x", lambda x: x.new_ones(x.shape[-1])), ValueError, _functional_norm),
    "x_3d": Mistake(_tensor("x", lambda x: x.new_ones(2, *x.shape)), ValueError, _functional_norm),
    "no_statistics": Mistake(
        _statistic("mean", lambda c: None), fits=lambda c: _evaluation(c) and 0 not in c.value_shape
    ),
    "running_size": Mistake(
        _statistic("var", lambda c: _ones(c, c.config.n + 2)), RuntimeError, _tracked
    ),
    "bn_weight_size": Mistake(
        _statistic("weight", lambda c: _ones(c, c.config.n + 2)), RuntimeError, _affine
    ),
    "momentum_word": Mistake(_statistic("momentum", lambda c: "0.1"), fits=_training),
    "momentum_negative": Mistake(
        _statistic("momentum", lambda c: -0.5), ValueError, _functional_norm
    ),
    "eps_word": Mistake(_statistic("eps", lambda c: "small"), fits=_normed),
    "eps_none": Mistake(_statistic("eps", lambda c: None), fits=_normed),
}


def _full_operands(config: LinearConfig) -> bool:
    """Whether a step is bound to the number of rows, so that another x is wrong by itself."""
    operands = [step.operand for step in (*config.program, *config.after) if step.operand]
    return any(len(operand.shape) > 1 for operand in operands)


def _too_many(case: Case) -> None:
    steps = [pcf.relu()] * (MAX_STEPS + 1)
    tensors = case.tensors
    call = lambda: ops.linear(tensors["x"], tensors["weight"], epilogue=steps)  # noqa: E731
    case.instead = (call, call)


MISTAKES["too_many_steps"] = Mistake(_too_many, ValueError, _plain)
