"""What a call would do, found by the code that does it."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pycutfuse import config
from pycutfuse.ops import _gate, _launch, _linear, _linear_batch_norm_raw
from pycutfuse.program import Encoded, describe

RANGE_NOTE = (
    "an element 2^40 times smaller than the largest of its row of x or weight contributes nothing"
)


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
        Precision tier after reading torch's flags.
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


def _explain(
    operator: str,
    program: str,
    precision: str,
    reason: str | None,
    found: "_launch.Recipe | _launch.Refusal | None",
) -> Explanation:
    tier = config.resolve_tier(precision)
    if reason is not None:
        return Explanation(operator, "fallback", reason, tier, program)
    if tier != "ieee":
        return Explanation(operator, "hand-over", _linear.tier_reason(tier), tier, program)
    assert found is not None
    if isinstance(found, _launch.Refusal):
        path = "fallback" if found.fallback else "hand-over"
        return Explanation(operator, path, found.reason, tier, program)
    stages = tuple(line for line in found.plan.describe().splitlines() if line)
    policy = repr(found.plan.policy)
    return Explanation(operator, "fused", None, tier, program, policy, stages, (RANGE_NOTE,))


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
    reason = _gate.why_reference(x, weight, operands)
    found = None
    if reason is None:
        found = _launch.lookup(x, weight, planes, program, operands)
    text = describe(program.codes, program.constants)
    return _explain(_linear.NAME, text, precision, reason, found)


def explain_chain(operator: str, reason: str, precision: str | None) -> Explanation:
    """Explain a module whose children run one after the other."""
    tier = config.resolve_tier(precision or config.current_precision())
    return Explanation(operator, "fallback", reason, tier, "its children, one by one")


def explain_linear_batch_norm(call: _linear_batch_norm_raw.Call) -> Explanation:
    """Explain a call of `pycutfuse.ops._linear_batch_norm.run`."""
    reason = _gate.why_reference(call.x, call.weight, call.differentiable)
    _linear_batch_norm_raw.check(call)
    found = None if reason is not None else _linear_batch_norm_raw.lookup(call)
    before = describe(call.program.codes, call.program.constants)
    after = describe(call.after.codes, call.after.constants) if call.after.codes else ""
    tail = "batch_norm (batch)" if call.training else "batch_norm (running statistics)"
    text = " | ".join(part for part in (before, tail, after) if part)
    return _explain(_linear_batch_norm_raw.NAME, text, call.precision, reason, found)
