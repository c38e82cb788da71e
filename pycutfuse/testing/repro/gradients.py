"""How far rounding alone takes a gradient: the terms that it sums, in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pycutfuse.testing.repro.calls import Case, plain_step
from pycutfuse.testing.repro.envelope import Envelope, Rounding, clean
from pycutfuse.testing.repro.tails import LogSumExp, batch_norm

VALUE = "value"  # of the contraction, before the bias


def typical_errors(case: Case, upstream: Tensor, rounding: Rounding) -> dict[str, Tensor]:
    """Errors of the gradients of `case`, which is in float64, if rounding has random signs.

    Every gradient is a sum of products: x's and weight's are contractions, the others sums over
    the dimensions that broadcast. Terms that cancel leave an error of their own size, not of the
    sum's, as in the envelope of a contraction.

    Parameters
    ----------
    upstream : Tensor
        The gradient that enters backward, in float64.

    Returns
    -------
    dict
        By the names of ``case.config.backward``, each of the gradient's shape and device.
    """
    terms = _terms(case, upstream)
    x, weight = (case.tensors[name].detach() for name in ("x", "weight"))
    m, (n, k) = math.prod(x.shape[:-1]), weight.shape
    rows, columns = terms[VALUE].reshape(m, n), x.reshape(m, k).mT
    found = {}
    for name in case.config.backward:
        if name == "x":
            of_rows = Envelope.contraction(rows, weight.mT, rounding)
            found[name] = of_rows.typical.reshape(x.shape)
        elif name == "weight":
            found[name] = Envelope.contraction(rows.mT, columns, rounding).typical
        else:
            tensor = case.tensors[name]
            found[name] = _of_sum(terms[name], tensor.shape, rounding).to(tensor.device)
    return found


def _of_sum(terms: Tensor, shape: torch.Size, rounding: Rounding) -> Tensor:
    total, squares = terms.sum_to_size(shape), terms.square().sum_to_size(shape)
    return clean(rounding.floor * torch.maximum(squares.sqrt(), total.abs()), total)


def _terms(case: Case, upstream: Tensor) -> dict[str, Tensor]:
    """Gradients of the contraction's value and of each operand repeated for all its elements."""
    leaves: dict[str, Tensor] = {}

    def leaf(name: str, tensor: Tensor) -> Tensor:
        leaves[name] = tensor.detach().clone().requires_grad_()
        return leaves[name]

    product = F.linear(case.tensors["x"], case.tensors["weight"])

    def spread(name: str) -> Tensor | None:
        tensor = case.tensors.get(name)
        return None if tensor is None else leaf(name, tensor.to(product).expand_as(product))

    with torch.enable_grad():
        value = leaf(VALUE, product)
        if (bias := spread("bias")) is not None:
            value = value + bias
        for at, (recipe, _) in enumerate(case.steps("step")):
            value = plain_step(value, recipe, spread(f"step{at}"))
        if case.statistics is not None:
            bare = replace(case.statistics.copy(), weight=None, bias=None)
            value = batch_norm(value, bare)
            weight, bias = spread("bn_weight"), spread("bn_bias")
            if weight is not None and bias is not None:
                value = value * weight + bias
            for at, (recipe, _) in enumerate(case.steps("after")):
                value = plain_step(value, recipe, spread(f"after{at}"))
        elif isinstance(case.config.tail, LogSumExp):
            value = value.logsumexp(-1)
        found = torch.autograd.grad(value, list(leaves.values()), upstream)
    return dict(zip(leaves, found, strict=True))
