"""How far rounding alone takes a gradient: the terms that it sums, in float64."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pycutfuse.testing.repro.calls import operator_of
from pycutfuse.testing.repro.case import Case, plain_step
from pycutfuse.testing.repro.envelope import Rounding, as_rows, clean, of_rows
from pycutfuse.testing.repro.tails import LogSumExp, batch_norm

VALUE = "value"  # of the contraction, before the bias
NOISE = "noise of "


def typical_errors(case: Case, upstream: Tensor, rounding: Rounding) -> dict[str, Tensor]:
    """Errors of the gradients of `case`, which is in float64, if rounding has random signs.

    Every gradient is a sum of products: x's and weight's are contractions, the others sums over
    the dimensions that broadcast. Terms that cancel leave an error of their own size, not of the
    sum's, as in the envelope of a contraction. A factor of what a batch norm made sees the rounding
    of the mean, too, which is all that there is where the values of a channel are equal.

    Parameters
    ----------
    upstream : Tensor
        The gradient that enters backward, in float64.

    Returns
    -------
    dict
        By the names of ``case.config.backward``, each of the gradient's shape and device.
    """
    terms = _terms(case, upstream, rounding)
    operator = operator_of(case.config)
    found = {}
    for name in case.config.backward:
        if name in ("x", "weight"):
            found[name] = operator.gradient_error(name, case, terms[VALUE], rounding)
        else:
            tensor = case.tensors[name]
            shape = case.aligned(name).shape
            typical = _of_sum(terms[name], shape, rounding)
            if (noise := terms.get(NOISE + name)) is not None:
                typical = typical + _typical(noise, shape)
            found[name] = typical.reshape(tensor.shape).to(tensor.device)
    return found


def _typical(terms: Tensor, shape: torch.Size) -> Tensor:
    """The larger of their sum and of a sum of as large ones with random signs."""
    total, squares = terms.sum_to_size(shape), terms.square().sum_to_size(shape)
    return torch.maximum(squares.sqrt(), total.abs())


def _of_sum(terms: Tensor, shape: torch.Size, rounding: Rounding) -> Tensor:
    return clean(rounding.floor * _typical(terms, shape), terms.sum_to_size(shape))


def _of_norm(z: Tensor, case: Case, rounding: Rounding) -> Tensor:
    """Rounding of the mean and of z, as the normalised values see it."""
    s, dims = case.statistics, case.config.pixel_dims
    assert s is not None
    rows = as_rows(z, dims)
    mean, var = s.mean, s.var
    if s.training or mean is None or var is None:
        mean, var = rows.mean(0), rows.var(0, unbiased=False)
    size = rounding.unit * (rows.abs() + mean.abs()) / (var + s.eps).sqrt()
    return of_rows(clean(size, rows), z.shape, dims)


def _terms(case: Case, upstream: Tensor, rounding: Rounding) -> dict[str, Tensor]:
    """Gradients of the contraction's value and of each operand repeated for all its elements.

    Under ``NOISE`` and a name what rounding before a batch norm adds to the operand's.
    """
    leaves: dict[str, Tensor] = {}

    def leaf(name: str, tensor: Tensor) -> Tensor:
        leaves[name] = tensor.detach().clone().requires_grad_()
        return leaves[name]

    product = operator_of(case.config).product(case).detach()

    def spread(name: str) -> Tensor | None:
        tensor = case.aligned(name)
        return None if tensor is None else leaf(name, tensor.to(product).expand_as(product))

    noise = torch.zeros_like(product)
    with torch.enable_grad():
        value = leaf(VALUE, product)
        if (bias := spread("bias")) is not None:
            value = value + bias
        for at, (recipe, _) in enumerate(case.steps("step")):
            value = plain_step(value, recipe, spread(f"step{at}"))
        if case.statistics is not None:
            noise = _of_norm(value.detach(), case, rounding)
            bare = replace(case.statistics.copy(), weight=None, bias=None)
            value = batch_norm(value, bare)
            weight, bias = spread("bn_weight"), spread("bn_bias")
            if weight is not None and bias is not None:
                value = value * weight + bias + leaf(NOISE + "bn_weight", torch.zeros_like(value))
            for at, (recipe, operand) in enumerate(case.steps("after")):
                value = plain_step(value, recipe, spread(f"after{at}"))
                if operand is not None:
                    value = value + leaf(f"{NOISE}after{at}", torch.zeros_like(value))
        elif isinstance(case.config.tail, LogSumExp):
            value = value.logsumexp(-1)
        found = torch.autograd.grad(value, list(leaves.values()), upstream)
    terms = dict(zip(leaves, found, strict=True))
    return {name: t * noise if name.startswith(NOISE) else t for name, t in terms.items()}
