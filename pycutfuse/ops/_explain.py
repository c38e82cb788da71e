"""What a call would do, found by the code that does it."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from pycutfuse import config, support
from pycutfuse.ops import _children, _gate, _launch, _linear, _logsumexp, _vjp
from pycutfuse.ops import _linear_batch_norm_raw as raw
from pycutfuse.ops._contraction import is_strict
from pycutfuse.program import Encoded, describe

RANGE_NOTE = (
    "an element 2^40 times smaller than the largest of its row of x or weight contributes nothing"
)
CHILDREN = "its children, one by one"
PLANES_NOTE = "the planes were frozen at the tf32 tier, so the weight is split at this call"


@dataclass(frozen=True)
class Explanation:
    """Which path a call takes, and why.

    Attributes
    ----------
    operator : str
        Name of the operator.
    path : {"fused", "hand-over", "fallback"}
        Fused kernels; or torch, for a supported call; or the reference chain.
    reason : str or None
        Why torch runs instead, None on the fused path.
    tier : str
        Precision tier after reading torch's flags, or the dtype of 16-bit tensors.
    program : str
        The pointwise steps, tail included.
    policy : str or None
        Kernel and launch policy, on the fused path.
    stages : tuple of str
        Stages of the plan, on the fused path.
    notes : tuple of str
        Limits that hold for the call.
    """

    operator: str
    path: str
    reason: str | None
    tier: str
    program: str
    policy: str | None = None
    stages: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.operator}: {self.path} ({self.reason or self.tier})"]
        if self.path != "fused":
            lines.append(f"  tier: {self.tier}")
        lines.append(f"  program: {self.program}")
        if self.policy is not None:
            lines.append(f"  policy: {self.policy}")
        lines += [f"  stage: {stage}" for stage in self.stages]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def of_recipe(
    operator: str,
    program: str,
    tier: str,
    found: _launch.Recipe | _launch.Refusal,
    planes: Tensor | None = None,
) -> Explanation:
    """Explain what `_launch.lookup` found for a call, which may bring frozen planes."""
    if isinstance(found, _launch.Refusal):
        path = "fallback" if found.fallback else "hand-over"
        return Explanation(operator, path, found.reason, tier, program)
    stages = tuple(line for line in found.plan.describe().splitlines() if line)
    notes = [RANGE_NOTE] if found.dtype is torch.float32 else []
    if planes is not None and not found.frozen:
        notes.append(PLANES_NOTE)
    for name, view in (("x", found.x), ("weight", found.weight)):
        if view.copy:
            notes.append(f"{name} is copied first: its rows do not lie as a kernel reads them")
    policy = None if getattr(found.plan.policy, "arch", None) == 0 else repr(found.plan.policy)
    return Explanation(operator, "fused", None, tier, program, policy, stages, tuple(notes))


def detour_of(
    operator: str, reason: str | None, x: Tensor, tier: str, program: str
) -> Explanation | None:
    """Explain a call that does not reach the launcher, `reason` being the gate's; else None."""
    if reason is None and tier == "torch":
        reason = support.device_problem(x.get_device()) if x.is_cpu else None
        if reason is None:
            return Explanation(operator, "hand-over", _linear.HAND_OVER, tier, program)
    return None if reason is None else Explanation(operator, "fallback", reason, tier, program)


def _tier(x: Tensor, precision: str) -> str:
    tier = config.resolve_tier(precision)
    if tier == "torch" or x.dtype not in (torch.float16, torch.bfloat16):
        return tier
    return str(x.dtype).replace("torch.", "")


def _empty(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype)


def explain_linear(
    x: Tensor,
    weight: Tensor,
    planes: Tensor | None,
    words: Tensor | None,
    program: Encoded,
    operands: Sequence[Tensor],
    precision: str,
) -> Explanation:
    """Explain a call of `pycutfuse.ops._linear.run`."""
    name, text = _linear.NAME, describe(program.codes, program.constants)
    reason = None
    if _gate.autocasts(x):
        reason = _gate.why_not_autocast(program)
        x, weight, operands = _gate.autocast(x, weight, program, operands, _empty)
        planes = None
    with _vjp.without_autocast(x) if x.is_cuda else nullcontext():
        reason = reason or _gate.why_reference(x, weight, operands)
        _linear.check(x, weight, program, operands)
    tier = _tier(x, precision)
    detour = detour_of(name, reason, x, tier, text)
    if detour is not None:
        return detour
    resolved = config.resolve_tier(precision)
    found = _launch.lookup(x, weight, planes, program, operands, resolved)
    return of_recipe(name, text, tier, found, planes)


def explain_chain(operator: str, reason: str, x: Tensor, precision: str | None) -> Explanation:
    """Explain a module whose children run one after the other."""
    strict = _children.asks_more(x, precision, is_strict)
    return of_children(operator, reason, strict, _tier(x, config.DEFAULT))


def of_children(operator: str, reason: str, strict: bool, torchs: str) -> Explanation:
    """Explain children that run; `strict` as of `_children.asks_more`; `torchs`: torch's tier."""
    tier = "ieee" if strict and _children.holds_tier(reason) else torchs
    return Explanation(operator, "fallback", _children.why(reason, strict), tier, CHILDREN)


def explain_linear_batch_norm(call: raw.Call) -> Explanation:
    """Explain a call of `pycutfuse.ops._linear_batch_norm.run`."""
    reason = None
    if _gate.autocasts(call.x):
        reason = _gate.why_not_autocast(call.program, call.after)
        x, weight, operands = _gate.autocast(
            call.x, call.weight, call.program, call.operands, _empty
        )
        call = call._replace(x=x, weight=weight, planes=None, words=None, operands=operands)
    with _vjp.without_autocast(call.x) if call.x.is_cuda else nullcontext():
        reason = reason or raw.why_reference(call)
        _gate.check_bias(call.weight, call.program, call.operands)
        _gate.check_dtypes(call.x, call.weight)
    raw.check(call)
    before = describe(call.program.codes, call.program.constants)
    after = describe(call.after.codes, call.after.constants) if call.after.codes else ""
    tail = "batch_norm (batch)" if call.training else "batch_norm (running statistics)"
    text = " | ".join(part for part in (before, tail, after) if part)
    tier = _tier(call.x, call.precision)
    detour = detour_of(raw.NAME, reason, call.x, tier, text)
    if detour is not None:
        return detour
    found = raw.lookup(call, config.resolve_tier(call.precision))
    return of_recipe(raw.NAME, text, tier, found, call.planes)


def explain_logsumexp(x: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Explanation:
    """Explain a call of `pycutfuse.ops.logsumexp`."""
    name, tier = _logsumexp.NAME, "ieee"
    dims = _logsumexp.check(x, dim, keepdim)
    program = f"logsumexp(dim={dims})"
    reason = _logsumexp.why_reference(x, dims)
    if reason is None and config.current_precision() == "torch":
        return Explanation(name, "hand-over", _logsumexp.HAND_OVER, "torch", program)
    if reason is None and not x.is_cuda:
        reason = f"{x.device.type} tensors"
    if reason is not None:
        return Explanation(name, "fallback", reason, tier, program)
    found = _logsumexp.lookup(x, dims, keepdim, _logsumexp.is_wide(x))
    if isinstance(found, _launch.Refusal):
        path = "fallback" if found.fallback else "hand-over"
        return Explanation(name, path, found.reason, tier, program)
    stages = ("reduce", "merge")[: 1 + (found.workspace_bytes > 0)]
    return Explanation(name, "fused", None, tier, program, repr(found.plan), stages)
