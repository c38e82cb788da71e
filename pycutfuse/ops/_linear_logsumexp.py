"""Linear, program, logsumexp: the raw operator, its autograd function, and the functional API."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pycutfuse import _library, config, reference
from pycutfuse.ops import _gate, _launch, _linear, _vjp
from pycutfuse.ops._contraction import contract, is_strict
from pycutfuse.ops._memo import Memo
from pycutfuse.program import Encoded, Program

NAME = "linear_logsumexp"
TAIL = "logsumexp"


def _by_torch(
    x: Tensor,
    weight: Tensor,
    codes: Sequence[int],
    constants: Sequence[float],
    operands: Sequence[Tensor],
    precision: str,
) -> Tensor:
    logits = _linear.forward_by_torch(x, weight, codes, constants, operands, precision)
    return torch.logsumexp(logits, -1)


_forward_cpu = partial(_linear.forward_on_cpu, NAME, _by_torch)
_forward_cuda = partial(_linear.forward_on_cuda, NAME, TAIL, _by_torch)


def _forward_fake(
    x: Tensor,
    weight: Tensor,
    planes: Tensor | None,
    words: Tensor | None,
    codes: list[int],
    constants: list[float],
    operands: list[Tensor],
    precision: str,
) -> Tensor:
    _gate.check_linear(x, weight)
    _gate.check_operands((*x.shape[:-1], *weight.shape[:-1]), operands, "program")
    return x.new_empty(x.shape[:-1], dtype=_vjp.promoted(x.dtype, operands))


def logits_vjp(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    codes: Sequence[int],
    constants: Sequence[float],
    operands: Sequence[Tensor],
    precision: str,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """Gradients of x, weight and operands that `needs` wants; the logits are contracted again."""
    shape = (*x.shape[:-1], weight.shape[0])
    value = contract(_vjp.as_rows(x), weight, precision).reshape(shape)
    logits = reference.apply_program(value, codes, constants, operands)
    of_logits = _vjp.logsumexp_vjp(grad, logits)
    of_value, of_operands = reference.program_vjp(
        codes, constants, operands, value, of_logits, needs[2:]
    )
    of_value = of_value.to(x.dtype)
    pair = _vjp.linear_vjp(x, weight, of_value, needs[0], needs[1], precision)
    return *pair, of_operands


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    codes: list[int],
    constants: list[float],
    operands: list[Tensor],
    precision: str,
    needs: list[bool],
) -> list[Tensor]:
    with _vjp.without_autocast(x):
        of_x, of_weight, of_operands = logits_vjp(
            grad, x, weight, codes, constants, operands, precision, needs
        )
        inputs = (grad, x, weight, *operands)
        return _vjp.own_memory((of_x, of_weight, *of_operands), inputs)


def _backward_fake(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    codes: list[int],
    constants: list[float],
    operands: list[Tensor],
    precision: str,
    needs: list[bool],
) -> list[Tensor]:
    return _vjp.fake_grads((x, weight, *operands), needs)


_forward_op = _library.define(
    "linear_logsumexp",
    "(Tensor x, Tensor weight, Tensor? planes, Tensor? words, int[] codes, float[] constants, "
    "Tensor[] operands, str precision) -> Tensor",
    cpu=_forward_cpu,
    cuda=_forward_cuda,
    fake=_forward_fake,
)
_backward_op = _library.define_backward(
    "linear_logsumexp_backward",
    "(Tensor grad, Tensor x, Tensor weight, int[] codes, float[] constants, "
    "Tensor[] operands, str precision, bool[] needs) -> Tensor[]",
    cpu=_backward,
    cuda=_backward,
    fake=_backward_fake,
)


class LinearLogSumExpFunction(torch.autograd.Function):
    """Records `linear_logsumexp`; backward is the vjp of the reference, once differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        planes: Tensor | None,
        words: Tensor | None,
        codes: tuple[int, ...],
        constants: tuple[float, ...],
        precision: str,
        recipe: _launch.Recipe | None,
        *operands: Tensor,
    ) -> Tensor:
        out: Tensor
        if recipe is not None:
            out = _launch.launch(recipe, (x, weight, planes, *operands), words)
        else:
            head = (x, weight, planes, words, codes, constants)
            out = _forward_op(*head, operands, precision)
        ctx.save_for_backward(x, weight, *operands)
        ctx.settings = codes, constants, precision
        return out

    @staticmethod
    @_vjp.once_differentiable
    def backward(ctx: Any, saved: Sequence[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *operands = saved
        asked = ctx.needs_input_grad
        needs = [asked[0], asked[1], *asked[8:]]
        codes, constants, precision = ctx.settings
        grads = _backward_op(grad, x, weight, codes, constants, operands, precision, needs)
        of_x, of_weight, *of_operands = _vjp.restore(grads, needs)
        return of_x, of_weight, None, None, None, None, None, None, *of_operands


_apply = _gate.plain_apply(LinearLogSumExpFunction)
_KIND = _linear.Kind(NAME, TAIL, reference.linear_logsumexp)


def why_reference(x: Tensor, weight: Tensor, operands: Sequence[Tensor]) -> str | None:
    """Say why the plain chain must run, with torch's own autograd, or None."""
    return _gate.why_reference(x, weight, operands) or why_autocast(x)


def why_autocast(x: Tensor) -> str | None:
    """Say why autocast's result needs the plain chain, or None."""
    return "autocast runs logsumexp in float32" if _gate.autocasts(x) else None


def run(
    x: Tensor,
    weight: Tensor,
    planes: Tensor | None,
    words: Tensor | None,
    program: Encoded,
    operands: Sequence[Tensor],
    precision: str,
    memo: Memo | None = None,
) -> Tensor:
    """Run the operator, or the plain chain where the operator cannot answer."""
    given = (x, weight, planes, words, program, operands, precision, memo)
    decided = _linear.run_decided(_KIND, _apply, *given)
    if decided is not None:
        return decided
    codes, constants = program.codes, program.constants
    _gate.check_tensor(x)
    _gate.check_bias(weight, program, operands)
    reason = why_reference(x, weight, operands)
    if reason is not None:
        _linear.check(x, weight, program, operands)
        config.report_fallback(NAME, reason)
        own = program.biased, is_strict(x, precision)
        return reference.linear_logsumexp(x, weight, codes, constants, operands, *own)
    out: Tensor
    if torch.is_grad_enabled() and _gate.any_requires_grad(x, weight, operands):
        function: Any = LinearLogSumExpFunction
        inputs = (x, weight, planes, words, codes, constants, precision, None)
        out = function.apply(*inputs, *operands)
    else:
        out = _forward_op(x, weight, planes, words, codes, constants, operands, precision)
    return out


def linear_logsumexp(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    epilogue: Program = (),
    precision: config.Precision | None = None,
) -> Tensor:
    r"""``logsumexp(program(x @ weight.T + bias), dim=-1)``; the logits are never stored.

    Parameters
    ----------
    x : Tensor
        ``(*, in_features)``, any strides.
    weight : Tensor
        ``(out_features, in_features)``, any strides.
    bias : Tensor, optional
        ``(out_features,)``; it counts as one step.
    epilogue : sequence of Step
        At most 16 steps, the bias included, as in `linear`.
    precision : {"ieee", "tf32", "torch"}, optional
        As in `linear`.

    Returns
    -------
    Tensor
        ``(*)``, contiguous.

    Raises
    ------
    RuntimeError
        If shapes or dtypes do not fit, as ``torch.nn.functional.linear``.
    TypeError
        If an argument is no tensor, or a step no `Step`.
    ValueError
        If the program is too long or the precision unknown.

    Notes
    -----
    Special values as in `logsumexp`. Gradients are once differentiable on the fused path; backward
    contracts the logits again.

    Examples
    --------
    >>> import torch, pycutfuse as pcf
    >>> x, weight = torch.zeros(2, 3), torch.ones(4, 3)
    >>> pcf.ops.linear_logsumexp(x, weight, epilogue=(pcf.add(1000.0),))
    tensor([1001.3863, 1001.3863])
    """
    return run(*_linear.prepare(x, weight, bias, epilogue=epilogue, precision=precision))
