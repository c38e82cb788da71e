"""Kernels of another architecture, forced on this GPU: every ieee policy of it in turn."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pycutfuse._console import progress
from pycutfuse._loader import native
from pycutfuse.bench import flags, timing, usage
from pycutfuse.bench.case import ForcedCase
from pycutfuse.bench.cases import plain_linear
from pycutfuse.bench.problem import describe
from pycutfuse.bench.results import EAGER, OURS, CaseResult
from pycutfuse.bench.runner import (
    AS_BUILT,
    Options,
    make_inputs,
    make_reference,
    verified,
)
from pycutfuse.bench.timing import Variant
from pycutfuse.testing import forced_policy

if TYPE_CHECKING:
    from pycutfuse._C import GemmPolicy

DATA = (AS_BUILT, "rand", "randn")


def policies(arch: int) -> list[GemmPolicy]:
    """The compiled policies of an architecture that promote, as only those of ieee do."""
    binding = native().binding
    if binding is None:
        return []
    return [p for p in binding.compiled_policies() if p.arch == arch and p.promote_k > 0]


def why_skipped(case: ForcedCase, device: torch.device) -> str | None:
    """Why there is nothing to force, None if there is."""
    if device.type != "cuda":
        return "no GPU"
    if not policies(case.arch):
        return f"no ieee policy of architecture {case.arch} is compiled"
    return None


def run_forced(case: ForcedCase, options: Options, device: torch.device) -> list[CaseResult]:
    """Verify and time each policy beside eager; one that raises is a failed result."""
    found = []
    for policy in policies(case.arch):
        name = f"{case.name}.{case.shape}.{label(policy)}"
        progress(f"  {policy!r}")
        try:
            found.append(_run(name, case, policy, options, device))
        except Exception as error:  # the other policies are still of interest
            failures = {OURS: describe(error)}
            shape = str(case.shape)
            found.append(CaseResult(name, "Linear", shape, False, [], failures=failures))
        usage.release()
    return found


def label(policy: GemmPolicy) -> str:
    """Tile and promotion of a policy, for a name."""
    return f"{policy.tile_m}x{policy.tile_n}k{policy.promote_k}"


def _run(
    name: str, case: ForcedCase, policy: GemmPolicy, options: Options, device: torch.device
) -> CaseResult:
    linear = plain_linear(case.name, case.shape)
    with flags.fp32_precision(options.at.tf32):
        with forced_policy(policy):
            result = replace(verified(linear, options, device, DATA), name=name)
        if not (result.passed and result.fused):
            return result
        reference = make_reference(linear, options.at, device)
        sets = make_inputs(case.shape, options.at, device)
        variants = [
            Variant(EAGER, timing.rotating(reference, sets)),
            Variant(
                OURS,
                timing.rotating(linear.fused(reference), sets),
                lambda: forced_policy(policy),
            ),
        ]
        for variant in variants:
            timing.warm_up(variant)
        return replace(
            result, timings=timing.interleave(variants, options.settings, timing.sample_cuda)
        )
