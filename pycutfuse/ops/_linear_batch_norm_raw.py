"""The raw operators behind `linear_batch_norm`: schemas, kernels, fake kernels."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pycutfuse import _library, config, reference
from pycutfuse.ops import _gate, _launch, _linear_batch_norm_vjp, _vjp, _workspace
from pycutfuse.ops._linear import HAND_OVER, forward_by_torch
from pycutfuse.program import Encoded

NAME = "linear_batch_norm"


Found = TypeVar("Found")


class Call(NamedTuple):
    """Arguments of one call; `flat` and `of_flat` convert to and from the operator's schema."""

    x: Tensor
    weight: Tensor
    planes: Tensor | None
    words: Tensor | None
    program: Encoded
    operands: Sequence[Tensor]
    bn_weight: Tensor | None
    bn_bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    training: bool
    momentum: float  # negative: None
    eps: float
    after: Encoded
    after_operands: Sequence[Tensor]
    precision: str


# Functions and no properties or methods: torch.compile knows those of a named tuple from 2.11 on.


def statistics(call: Call) -> tuple[Tensor | None, ...]:
    """bn_weight, bn_bias, running_mean, running_var and num_batches_tracked."""
    return call[6:11]


def flat(call: Call) -> tuple[Any, ...]:
    """In the order of the schema."""
    program, after = call.program, call.after
    head = (*call[:4], program.codes, program.constants)
    return (*head, *call[5:14], after.codes, after.constants, *call[15:])


def of_flat(arguments: Sequence[Any]) -> Call:
    """`flat` undone."""
    program = Encoded(tuple(arguments[4]), tuple(arguments[5]))
    after = Encoded(tuple(arguments[15]), tuple(arguments[16]))
    return Call._make((*arguments[:4], program, *arguments[6:15], after, *arguments[17:]))


def check(call: Call) -> tuple[int, int]:
    """Raise, as torch, if the call is invalid; else the shape of its result. Changes nothing."""
    _gate.check_linear(call.x, call.weight)
    _gate.check_batch_norm(call.x, call.weight, call[6:10], call.training)
    out_shape = (call.x.shape[0], call.weight.shape[0])
    _gate.check_operands(out_shape, call.operands, "program")
    _gate.check_operands(out_shape, call.after_operands, "program after the tail")
    return out_shape


def why_reference(call: Call) -> str | None:
    """As `_gate.why_reference`."""
    operands = (*call.operands, *call.after_operands)
    return _gate.why_reference(call.x, call.weight, operands, statistics(call))


def _moments(dtype: torch.dtype) -> torch.dtype:
    """In which mean and 1 / std of values of `dtype` are saved."""
    return torch.promote_types(dtype, torch.float32)


def _by_torch(call: Call) -> tuple[Tensor, Tensor]:
    check(call)
    training, program, after = call.training, call.program, call.after
    z = forward_by_torch(
        call.x, call.weight, program.codes, program.constants, call.operands, call.precision
    )
    factor = reference.update_factor(call.num_batches_tracked, call.momentum, training)
    save = z.new_zeros((2, z.shape[1] if training else 0), dtype=_moments(z.dtype))
    if z.numel() == 0:
        y = z.clone()
    else:
        numbers = (training, factor, call.eps)
        y, mean, invstd = torch.ops.aten.native_batch_norm(z, *call[6:10], *numbers)
        if training:
            save[0], save[1] = mean, invstd
    y = reference.apply_program(y, after.codes, after.constants, call.after_operands)
    return y.contiguous(), save


def _forward_cpu(*arguments: Any) -> tuple[Tensor, Tensor]:
    config.report_fallback(NAME, "cpu tensors")
    return _by_torch(of_flat(arguments))


TAILS = ("batch_norm_eval", "batch_norm_train")  # by `training`, as `support.Problem` names them


def lookup(call: Call, tier: str) -> _launch.Recipe | _launch.Refusal:
    """The planned launch of `call`, or why there is none. Raises, as torch, if it is invalid."""
    found = find(_launch.cached, call, tier)
    if found is not None:
        return found
    check(call)
    tail = TAILS[call.training]
    head = (*call[:3], call.program, call.operands)
    return _launch.lookup(*head, tier, tail, statistics(call), call.after, call.after_operands)


def find(by: Callable[..., Found], call: Call, tier: str) -> Found:
    """What `by`, for example `_launch.cached` or a method of a memo, finds for a call."""
    return by(tensors(call), call.program, tier, TAILS[call.training], call.after)


def tensors(call: Call) -> tuple[Tensor | None, ...]:
    """In the order of `_launch.cached`."""
    return (*call[:3], *call.operands, *statistics(call), *call.after_operands)


def needs_grad(call: Call) -> bool:
    """Whether autograd records the call."""
    if not torch.is_grad_enabled():
        return False
    others = (*call.operands, *call.after_operands, *call[6:10])
    return _gate.any_requires_grad(call.x, call.weight, others)


def launch(recipe: _launch.Recipe, call: Call, save: Tensor | None) -> Tensor:
    """Launch a planned call.

    `save` (2, N) receives mean and 1 / std of the batch; None if nobody asks for them: then they
    go to the workspace.
    """
    return _launch.launch(recipe, tensors(call), call.words, call.momentum, call.eps, save)


def new_save(recipe: _launch.Recipe, training: bool) -> Tensor:
    """Memory for `launch`'s save; empty in evaluation."""
    features = recipe.problem.n if training else 0
    if recipe.blank is not None and _workspace.is_direct(recipe.index):
        return recipe.blank((2, features), (features, 1), torch.float32)
    return torch.empty(2, features, dtype=torch.float32, device=recipe.device)


def _forward_cuda(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = of_flat(arguments)
    tier = config.resolve_tier(call.precision)
    if tier != "torch":
        found = lookup(call, tier)
        if isinstance(found, _launch.Recipe):
            save = new_save(found, call.training)
            return launch(found, call, save), save
        _launch.report(NAME, found)
    else:
        config.count_handover(NAME, HAND_OVER)
    return _by_torch(call)


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = of_flat(arguments)
    out_shape = check(call)
    x, inner = call.x, _vjp.promoted(call.x.dtype, call.operands)
    out = x.new_empty(out_shape, dtype=_vjp.promoted(inner, call.after_operands))
    saved = (2, out_shape[1] if call.training else 0)
    return out, x.new_empty(saved, dtype=_moments(inner))


def _backward_fake(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    codes: list[int],
    constants: list[float],
    operands: list[Tensor],
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    save: Tensor,
    training: bool,
    eps: float,
    after_codes: list[int],
    after_constants: list[float],
    after_operands: list[Tensor],
    precision: str,
    needs: list[bool],
) -> list[Tensor]:
    affine = [weight if t is None else t for t in (bn_weight, bn_bias)]
    return _vjp.fake_grads((x, weight, *affine, *operands, *after_operands), needs)


forward = _library.define(
    "linear_batch_norm",
    "(Tensor x, Tensor weight, Tensor? planes, Tensor? words, int[] codes, float[] constants, "
    "Tensor[] operands, Tensor? bn_weight, Tensor? bn_bias, Tensor(a!)? running_mean, "
    "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, bool training, float momentum, "
    "float eps, int[] after_codes, float[] after_constants, Tensor[] after_operands, "
    "str precision) -> (Tensor out, Tensor save)",
    cpu=_forward_cpu,
    cuda=_forward_cuda,
    fake=_forward_fake,
)
backward = _library.define_backward(
    "linear_batch_norm_backward",
    "(Tensor grad, Tensor x, Tensor weight, int[] codes, float[] constants, Tensor[] operands, "
    "Tensor? bn_weight, Tensor? bn_bias, Tensor save, bool training, float eps, "
    "int[] after_codes, float[] after_constants, "
    "Tensor[] after_operands, str precision, bool[] needs) -> Tensor[]",
    cpu=_linear_batch_norm_vjp.backward,
    cuda=_linear_batch_norm_vjp.backward,
    fake=_backward_fake,
)
