"""What a call that ends in logsumexp would do, found by the code that does it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pycutfuse import config
from pycutfuse.ops import _chain, _chain_launch, _launch, _linear, _linear_logsumexp
from pycutfuse.ops._explain import RANGE_NOTE, Explanation, _tier, detour_of, of_recipe
from pycutfuse.program import Encoded, describe

# Two planes of one exponent for all rows: 2^14 times the value, in units of fp16's 2^-24.
BETWEEN_NOTE = "between the layers a value below 2^-17 is kept to 2^-39 and not to 22 bits"


def explain_linear_logsumexp(
    x: Tensor,
    weight: Tensor,
    planes: Tensor | None,
    words: Tensor | None,
    program: Encoded,
    operands: Sequence[Tensor],
    precision: str,
) -> Explanation:
    """Explain a call of `pycutfuse.ops._linear_logsumexp.run`."""
    name, tier = _linear_logsumexp.NAME, _tier(x, precision)
    text = f"{describe(program.codes, program.constants)} | logsumexp"
    reason = _linear_logsumexp.why_reference(x, weight, operands)
    _linear.check(x, weight, program, operands)
    detour = detour_of(name, reason, x, tier, text)
    if detour is not None:
        return detour
    resolved, tail = config.resolve_tier(precision), _linear_logsumexp.TAIL
    found = _launch.lookup(x, weight, planes, program, operands, resolved, tail)
    return of_recipe(name, text, tier, found, planes)


def explain_linear_linear_logsumexp(call: _chain.Call) -> Explanation:
    """Explain a call of `pycutfuse.ops._chain.run`."""
    name, tier = _chain.NAME, _tier(call.x, call.precision)
    first, second = (
        describe(layer.program.codes, layer.program.constants)
        for layer in (call.first, call.second)
    )
    text = f"{first} | linear | {second} | logsumexp"
    reason = _chain.why_reference(call)
    _chain.check_all(call)
    detour = detour_of(name, reason, call.x, tier, text)
    if detour is not None:
        return detour
    found = _chain_launch.lookup(call, config.resolve_tier(call.precision))
    if isinstance(found, _launch.Refusal):
        path = "fallback" if found.fallback else "hand-over"
        return Explanation(name, path, found.reason, tier, text)
    stages = tuple(line for line in found.plan.describe().splitlines() if line)
    notes = [RANGE_NOTE] if call.x.dtype is torch.float32 else []
    if tier == "ieee":
        notes.append(BETWEEN_NOTE)
    return Explanation(name, "fused", None, tier, text, None, stages, tuple(notes))
