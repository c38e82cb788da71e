"""What a call of a convolution operator would do, found by the code that does it."""

from contextlib import nullcontext

import torch
from torch import Tensor

from pycutfuse import config
from pycutfuse.ops import _children, _conv_call, _conv_launch, _gate, _vjp
from pycutfuse.ops._conv import autocasts
from pycutfuse.ops._conv_call import Call, with_bias
from pycutfuse.ops._explain import Explanation, detour_of, of_children
from pycutfuse.ops._launch import Refusal
from pycutfuse.program import describe

PACKED_NOTE = "the frozen weight is packed at the first call of this size"
X_NOTE = "x is copied first: its images span 2^30 elements or more"
COPY_NOTE = "operand {} is copied first: it is read by one stride of channels and one of pixels"


def resolved_tier(x: Tensor, precision: str) -> str:
    """Tier in words: that of float32, or the dtype of 16-bit tensors."""
    tier = config.resolve_conv_tier(precision)
    if tier == "torch" or x.dtype not in (torch.float16, torch.bfloat16):
        return tier
    return str(x.dtype).replace("torch.", "")


def _program(call: Call) -> str:
    program = call.program if call.bias is None else with_bias(call.program)
    parts = [describe(program.codes, program.constants)]
    if call.norm is not None:
        statistics = "batch" if call.norm.training else "running statistics"
        parts.append(f"batch_norm ({statistics})")
    after = _conv_call.after(call)
    if after.codes:
        parts.append(describe(after.codes, after.constants))
    return " | ".join(parts)


def _empty(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype)


def explain_conv(call: Call) -> Explanation:
    """Explain a call of `pycutfuse.ops._conv.run` or `pycutfuse.ops._conv_batch_norm.run`."""
    name, reason = _conv_call.operator_name(call), None
    if _gate.autocasts(call.x):
        call, reason = autocasts(call, _empty)
    with _vjp.without_autocast(call.x) if call.x.is_cuda else nullcontext():
        reason = reason or _conv_call.why_reference(call)
        _conv_call.check_dtypes(call)
    _conv_call.check(call)
    tier, text = resolved_tier(call.x, call.precision), _program(call)
    return detour_of(name, reason, call.x, tier, text) or of_recipe(call, tier, text)


def of_recipe(call: Call, tier: str, text: str) -> Explanation:
    """Explain what the launcher decides on a call that reaches it."""
    found = _conv_launch.lookup(call, config.resolve_conv_tier(call.precision))
    name = _conv_call.operator_name(call)
    if isinstance(found, Refusal):
        path = "fallback" if found.fallback else "hand-over"
        return Explanation(name, path, found.reason, tier, text)
    stages = tuple(line for line in found.plan.describe().splitlines() if line)
    notes = [PACKED_NOTE] if found.problem.packed else []
    notes += [X_NOTE] if found.copies_x else []
    notes += [COPY_NOTE.format(at) for at in found.operands.copies]
    policy = repr(found.plan.policy)
    return Explanation(name, "fused", None, tier, text, policy, stages, tuple(notes))


def explain_chain(operator: str, reason: str, x: Tensor, precision: str | None) -> Explanation:
    """Explain a module whose children run one after the other."""
    strict = _children.asks_more(x, precision, _conv_call.is_strict)
    return of_children(operator, reason, strict, resolved_tier(x, config.DEFAULT))
