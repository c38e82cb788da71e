"""Vector-Jacobian products of the reference chain, from saved inputs."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from pycutfuse import reference
from pycutfuse.ops._contraction import contract

Grads = tuple[Tensor | None, ...]


class _Once(torch.autograd.Function):
    """The first `count` tensors, tied to all: a derivative of them raises."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            "a second derivative of a fused call was asked for, which is once differentiable; "
            "run the plain chain for it, for example that of .to_torch()"
        )


def once_differentiable(
    backward: Callable[[Any, tuple[Tensor | None, ...], Tensor], Grads],
) -> Callable[[Any, Tensor], Grads]:
    """Make a backward of ``(ctx, ctx.saved_tensors, grad)`` whose second derivative raises.

    torch's decorator ties gradients to no input, so that where inputs are named, as by
    torch.autograd.grad, a second derivative would be left out in silence.
    """

    @wraps(backward)
    def once(ctx: Any, grad: Tensor) -> Grads:
        saved = ctx.saved_tensors  # read once, as torch.utils.checkpoint asks
        with torch.no_grad():
            found = backward(ctx, saved, grad)
        if not torch.is_grad_enabled():
            return found
        sources = [one for one in (grad, *saved) if one is not None and one.requires_grad]
        grads = [one for one in found if one is not None]
        if not sources or not grads:
            return found
        apply: Any = _Once.apply
        tied = iter(apply(len(grads), *grads, *sources))
        return tuple(None if one is None else next(tied) for one in found)

    return once


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast does not touch a backward: forward ran without it."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def as_rows(tensor: Tensor) -> Tensor:
    """(.., K) as (M, K), with nothing to infer: K may be 0."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def form_of(x: Tensor) -> Tensor:
    """What a backward is given that asks x for its shape, dtype and device alone: one element."""
    return x.new_empty(()).expand(x.shape)


_Form = tuple[torch.Size, torch.dtype, torch.device]


def keep(
    operands: Sequence[Tensor | None],
    codes: tuple[int, ...],
    needs: tuple[bool, ...],
    before: int = 0,
) -> tuple[Sequence[Tensor | None], Sequence[_Form | None]]:
    """What a backward saves of a program's operands, and what says those that it does not read.

    A summand may so be freed, or written to, before the backward runs, as in torch. The first
    `before` operands are added before the program, and `needs` is of the others. Graphs of
    torch.compile save all: their sizes may be symbols.
    """
    if torch.compiler.is_compiling():
        return operands, (None,) * len(operands)
    read = reference.read_operands(codes, needs)
    reads_value = before > 0 and reference.reads_value(codes, needs)
    saved: list[Tensor | None] = []
    forms: list[_Form | None] = []
    for at, one in enumerate(operands):
        whole = one is None or (reads_value if at < before else at - before in read)
        saved.append(one if whole else None)
        forms.append(None if one is None or whole else (one.shape, one.dtype, one.device))
    return saved, forms


def kept(saved: Sequence[Tensor | None], forms: Sequence[_Form | None]) -> list[Any]:
    """The operands that `keep` was given, of those that it did not save one element's form."""
    return [
        one if form is None else torch.empty((), dtype=form[1], device=form[2]).expand(form[0])
        for one, form in zip(saved, forms, strict=True)
    ]


def promoted(dtype: torch.dtype, operands: Sequence[Tensor]) -> torch.dtype:
    """Dtype of a program's result, as torch promotes."""
    for operand in operands:
        value = torch.empty(1, dtype=dtype, device="meta")
        dtype = torch.result_type(value, operand)
    return dtype


def linear_vjp(
    x: Tensor, weight: Tensor, grad: Tensor, needs_x: bool, needs_weight: bool, precision: str
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x (.., K) and weight (N, K) given that of x @ weight.T."""
    rows = as_rows(grad)
    of_x = of_weight = None
    if needs_x:
        of_x = contract(rows, weight.t(), precision).reshape(x.shape)
    if needs_weight:
        of_weight = contract(rows.t(), as_rows(x).t(), precision)
    return of_x, of_weight


def logsumexp_vjp(grad: Tensor, logits: Tensor) -> Tensor:
    """Gradient of logits (.., N) given that of their logsumexp (..): grad * softmax, in float32.

    As torch's own: 0 beside an infinite logit, NaN at it and where all are -inf. The logsumexp is
    taken of these logits: forward's differ in their last bits, which large logits would show.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    factors = (wide - torch.logsumexp(wide, -1, keepdim=True)).exp_()
    return factors.mul_(grad.unsqueeze(-1)).to(logits.dtype)


def own_memory(grads: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Drop the Nones and copy what shares memory: an operator's results must be its own."""
    taken = {tensor.untyped_storage()._cdata for tensor in inputs}
    own: list[Tensor] = []
    for grad in grads:
        if grad is None:
            continue
        grad = grad.contiguous()
        if grad.untyped_storage()._cdata in taken:
            grad = grad.clone()
        taken.add(grad.untyped_storage()._cdata)
        own.append(grad)
    return own


def fake_grads(tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """What `own_memory` returns, without data."""
    pairs = zip(tensors, needs, strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, need in pairs if need]


def restore(grads: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """Put None back where no gradient was needed."""
    found = iter(grads)
    return [next(found) if need else None for need in needs]
