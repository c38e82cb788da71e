"""Linear, program, linear, program, logsumexp: the raw operator and its autograd function."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pycutfuse import _library, config, reference
from pycutfuse.ops import _chain_launch, _gate, _handover, _launch, _linear, _linear_logsumexp, _vjp
from pycutfuse.ops._chain_launch import NAME, Call, Layer, check, of_flat
from pycutfuse.ops._contraction import contract, is_strict
from pycutfuse.ops._memo import Memo

__all__ = ["NAME", "Call", "ChainMemo", "Layer", "run"]


class ChainMemo(Memo):
    """`Memo` of chains."""

    __slots__ = ()

    _cached = staticmethod(_chain_launch.cached)


def _by_torch(call: Call) -> Tensor:
    check(call)
    x, first, second, precision = call
    program = first.program
    hidden = _linear.forward_by_torch(
        x, first.weight, program.codes, program.constants, first.operands, precision
    )
    program = second.program
    logits = _linear.forward_by_torch(
        hidden, second.weight, program.codes, program.constants, second.operands, precision
    )
    return torch.logsumexp(logits, -1)


def _forward_cpu(*arguments: Any) -> Tensor:
    config.report_fallback(NAME, "cpu tensors")
    return _by_torch(of_flat(arguments))


def _forward_cuda(*arguments: Any) -> Tensor:
    call = of_flat(arguments)
    tier = config.resolve_tier(call.precision)
    if tier == "torch":
        config.count_handover(NAME, _linear.HAND_OVER)
        return _by_torch(call)
    found = _chain_launch.lookup(call, tier)
    if isinstance(found, _chain_launch.Recipe):
        return _chain_launch.launch(found, call)
    _launch.report(NAME, found)
    return _by_torch(call)


def _forward_fake(*arguments: Any) -> Tensor:
    call = of_flat(arguments)
    check(call)
    operands = (*call.first.operands, *call.second.operands)
    return call.x.new_empty(call.x.shape[:-1], dtype=_vjp.promoted(call.x.dtype, operands))


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    codes: list[int],
    constants: list[float],
    operands: list[Tensor],
    second_weight: Tensor,
    second_codes: list[int],
    second_constants: list[float],
    second_operands: list[Tensor],
    precision: str,
    needs: list[bool],
) -> list[Tensor]:
    """Gradients in the order x, weight, operands, second weight, second operands."""
    split = 2 + len(operands)
    of_first, of_second = needs[:split], needs[split:]
    through = any(of_first)
    with _vjp.without_autocast(x):
        shape = (*x.shape[:-1], weight.shape[0])
        value = contract(_vjp.as_rows(x), weight, precision).reshape(shape)
        hidden = reference.apply_program(value, codes, constants, operands)
        second = (second_codes, second_constants, second_operands)
        of_hidden, of_second_weight, of_second_operands = _linear_logsumexp.logits_vjp(
            grad, hidden, second_weight, *second, precision, [through, *of_second]
        )
        found: list[Tensor | None] = [None] * split
        if of_hidden is not None:
            of_value, of_operands = reference.program_vjp(
                codes, constants, operands, value, of_hidden, of_first[2:]
            )
            of_value = of_value.to(x.dtype)
            pair = _vjp.linear_vjp(x, weight, of_value, of_first[0], of_first[1], precision)
            found = [*pair, *of_operands]
        return _vjp.own_memory(
            (*found, of_second_weight, *of_second_operands),
            (grad, x, weight, *operands, second_weight, *second_operands),
        )


def _backward_fake(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    codes: list[int],
    constants: list[float],
    operands: list[Tensor],
    second_weight: Tensor,
    second_codes: list[int],
    second_constants: list[float],
    second_operands: list[Tensor],
    precision: str,
    needs: list[bool],
) -> list[Tensor]:
    return _vjp.fake_grads((x, weight, *operands, second_weight, *second_operands), needs)


_forward_op = _library.define(
    "linear_linear_logsumexp",
    "(Tensor x, Tensor weight, Tensor? planes, Tensor? words, int[] codes, float[] constants, "
    "Tensor[] operands, Tensor second_weight, Tensor? second_planes, Tensor? second_words, "
    "int[] second_codes, float[] second_constants, Tensor[] second_operands, str precision) "
    "-> Tensor",
    cpu=_forward_cpu,
    cuda=_forward_cuda,
    fake=_forward_fake,
)
_backward_op = _library.define_backward(
    "linear_linear_logsumexp_backward",
    "(Tensor grad, Tensor x, Tensor weight, int[] codes, float[] constants, "
    "Tensor[] operands, Tensor second_weight, int[] second_codes, float[] second_constants, "
    "Tensor[] second_operands, str precision, bool[] needs) -> Tensor[]",
    cpu=_backward,
    cuda=_backward,
    fake=_backward_fake,
)

Program = tuple[tuple[int, ...], tuple[float, ...]]


class ChainFunction(torch.autograd.Function):
    """Records `linear_linear_logsumexp`; backward is the vjp of the reference."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        second_weight: Tensor,
        planes: Tensor | None,
        words: Tensor | None,
        second_planes: Tensor | None,
        second_words: Tensor | None,
        program: Program,
        second_program: Program,
        operand_count: int,
        precision: str,
        planned: tuple[_chain_launch.Recipe, Call] | None,
        *operands: Tensor,
    ) -> Tensor:
        out: Tensor
        if planned is not None:
            out = _chain_launch.launch(*planned)
        else:
            first = (weight, planes, words, *program, operands[:operand_count])
            second = (second_weight, second_planes, second_words, *second_program)
            out = _forward_op(x, *first, *second, operands[operand_count:], precision)
        ctx.save_for_backward(x, weight, second_weight, *operands)
        ctx.settings = program, second_program, operand_count, precision
        return out

    @staticmethod
    @_vjp.once_differentiable
    def backward(ctx: Any, saved: Sequence[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, second_weight, *operands = saved
        program, second_program, count, precision = ctx.settings
        asked = ctx.needs_input_grad
        of_operands = asked[12:]
        needs = [*asked[:2], *of_operands[:count], asked[2], *of_operands[count:]]
        first = (x, weight, *program, operands[:count])
        second = (second_weight, *second_program, operands[count:])
        grads = _backward_op(grad, *first, *second, precision, needs)
        grads = _vjp.restore(grads, needs)
        at = 2 + count  # Dynamo reads a list as a tuple: sliced, not popped
        inner, outer = grads[2:at], grads[at + 1 :]
        return grads[0], grads[1], grads[at], *[None] * 9, *inner, *outer


_apply = _gate.plain_apply(ChainFunction)


def why_reference(call: Call) -> str | None:
    """Say why the plain chain must run, with torch's own autograd, or None."""
    x, first, second, _ = call
    reason = _gate.why_reference(x, first.weight, first.operands)
    reason = reason or _gate.why_reference(x, second.weight, second.operands)
    return reason or _linear_logsumexp.why_autocast(x)


def run(call: Call, memo: ChainMemo | None = None) -> Tensor:
    """Run the operator, or the plain chain where the operator cannot answer."""
    x, first, second, precision = call
    recipe: Any = None
    if _gate.is_plain_eager():
        tier = config.resolve_tier(precision)
        if tier != "torch":
            find: Any = _chain_launch.cached if memo is None else memo.find
            key = (first.program, tier, _chain_launch.TAIL, second.program)
            found = find(_chain_launch.tensors(call), *key)
            records = (
                found is not None
                and torch.is_grad_enabled()
                and _gate.any_requires_grad(x, first.weight, _chain_launch.differentiable(call))
            )
            if not records and _handover.is_handed_over(NAME, found, x, tier):
                return _chain(call)
            recipe = None if isinstance(found, _launch.Refusal) else found
    if recipe is None:
        _check_biases(call)
        reason = why_reference(call)
        if reason is not None:
            return _by_chain(call, reason)
    others = _chain_launch.differentiable(call)
    if torch.is_grad_enabled() and _gate.any_requires_grad(x, first.weight, others):
        function: Any = ChainFunction
        apply = function.apply if recipe is None else _apply
        recorded: Tensor = apply(
            x,
            first.weight,
            second.weight,
            first.planes,
            first.words,
            second.planes,
            second.words,
            (first.program.codes, first.program.constants),
            (second.program.codes, second.program.constants),
            len(first.operands),
            precision,
            None if recipe is None else (recipe, call),
            *first.operands,
            *second.operands,
        )
        return recorded
    if recipe is not None:
        return _chain_launch.launch(recipe, call)
    out: Tensor = _forward_op(*_chain_launch.flat(call))
    return out


def _check_biases(call: Call) -> None:
    for layer in (call.first, call.second):
        _gate.check_bias(layer.weight, layer.program, layer.operands)


def check_all(call: Call) -> None:
    """Raise, as the plain chain, unless the call's dtypes and shapes fit."""
    _check_biases(call)
    _gate.check_dtypes(call.x, call.first.weight)
    check(call)


def _by_chain(call: Call, reason: str) -> Tensor:
    check_all(call)
    config.report_fallback(NAME, reason)
    return _chain(call)


def _chain(call: Call) -> Tensor:
    x, first, second, precision = call
    return reference.linear_linear_logsumexp(
        x,
        first.weight,
        first.program.codes,
        first.program.constants,
        first.operands,
        second.weight,
        second.program.codes,
        second.program.constants,
        second.operands,
        first.program.biased,
        second.program.biased,
        is_strict(x, precision),
    )
