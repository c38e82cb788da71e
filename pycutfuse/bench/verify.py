"""``python -m pycutfuse verify FILE``: ModelNew of a file against its Model."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from pycutfuse._console import progress
from pycutfuse.bench.accuracy import Check, failure
from pycutfuse.bench.compare import DISTRIBUTIONS, NOTHING, compare_models, draw, draw_weights
from pycutfuse.bench.flags import fp32_precision, quiet_fallback
from pycutfuse.bench.nested import found, mapped, same_bits
from pycutfuse.bench.problem import Problem, ProblemError, arguments, describe, load_problem
from pycutfuse.bench.tiers import TIERS, Tier

CPU_BATCH, CPU_ELEMENTS = 256, 2**20
"""Without a GPU the inputs' leading dimension is cut to this, or to as much of the largest input,
but no further than to 2, unless the user says otherwise."""


@dataclass(frozen=True)
class Verification:
    """Outcome of one file: structural faults in words, and the numerical checks."""

    faults: list[str]
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """True if there is no fault and every check passes (at least one was made)."""
        return not self.faults and bool(self.checks) and all(check.passed for check in self.checks)


def verify_file(
    path: str | Path,
    *,
    device: str | None = None,
    seed: int = 0,
    batch: int | None = None,
    tier: str = "ieee",
    out: TextIO | None = None,
) -> Verification:
    """Compare ``ModelNew`` with ``Model`` of a problem file and print each finding.

    Parameters
    ----------
    path : str or Path
        Defines ``Model``, ``ModelNew``, ``get_inputs`` and ``get_init_inputs``.
    device : str, optional
        By default ``cuda`` if there is one, else ``cpu``.
    seed : int
        Set before each constructor and each forward.
    batch : int, optional
        Cut the inputs' leading dimension to this many. By default not on a GPU, and to 256 on
        the CPU, or to as many as have 2^20 elements.
    tier : {"ieee", "tf32"}
        Torch's flags while both run, and what float32 tensors are promised at them.

    Raises
    ------
    ProblemError
        If the file, the device, or ``Model`` itself cannot be used.
    """
    out = sys.stdout if out is None else out
    problem = load_problem(path)
    where = _device(device)
    at = TIERS[tier]
    torch.manual_seed(seed)
    inputs = arguments(problem, "get_inputs")
    init = arguments(problem, "get_init_inputs")
    torch.manual_seed(seed)
    try:
        model = problem.model(*copy.deepcopy(init))
    except (Exception, SystemExit) as error:
        raise ProblemError(f"{problem.path}: Model raised {describe(error)}") from error
    torch.manual_seed(seed)
    title = f"{problem.path}: ModelNew against Model on {_device_name(where)}, seed {seed}"
    print(f"{title}, tier {tier} (TF32 {'allowed' if at.tf32 else 'off'})", file=out)
    on_cpu = where.type == "cpu"
    if on_cpu:
        print("no GPU is used: fused operators run their reference path here", file=out)
    try:
        candidate = problem.model_new(*copy.deepcopy(init))
    except (Exception, SystemExit) as error:
        return _report(Verification([f"ModelNew raised {describe(error)}"], []), out)
    try:
        faults = structural_faults(model, candidate)
    except (Exception, SystemExit) as error:  # of lazy or meta parameters, or a state_dict()
        raise ProblemError(
            f"{problem.path}: no state_dicts to compare: {describe(error)}"
        ) from error
    if faults:
        return _report(Verification(faults, []), out)
    count = sum(1 for _ in model.parameters())
    print(f"  parameters: {count}, bitwise equal; state_dict keys equal", file=out)
    inputs, cut = _cut(inputs, _cpu_batch(inputs) if batch is None and on_cpu else batch)
    if cut:
        print(f"  {cut}", file=out)
    try:
        inputs = mapped(lambda tensor: tensor.to(where), inputs)
        model, candidate = model.to(where), candidate.to(where)
    except (Exception, SystemExit) as error:  # out of memory
        raise ProblemError(
            f"{problem.path}: cannot be moved to {where}: {describe(error)}"
        ) from error
    checks: list[Check] = []
    for data in ("get_inputs()", *DISTRIBUTIONS):
        for training in (True, False):
            label = f"{'train' if training else 'eval'}, {data}"
            progress(f"  {label} ...")
            with quiet_fallback(on_cpu), fp32_precision(at.tf32):
                made = _compare(problem, model, candidate, inputs, data, training, seed, label, at)
            for check in made:
                if data in DISTRIBUTIONS and NOTHING in check.what:  # of our data, not the file's
                    print(f"  {check.what}", file=out, flush=True)
                    continue
                checks.append(check)
                print(f"  {line(check)}", file=out, flush=True)
    return _report(Verification([], checks), out)


def structural_faults(model: nn.Module, candidate: nn.Module) -> list[str]:
    """Differences in state_dict keys, or in shape, dtype or bits of parameters and buffers."""
    theirs, ours = model.state_dict(), candidate.state_dict()
    faults = []
    missing = [name for name in theirs if name not in ours]
    extra = [name for name in ours if name not in theirs]
    if missing:
        faults.append(f"state_dict of ModelNew lacks {', '.join(missing)}")
    if extra:
        faults.append(f"state_dict of ModelNew has {', '.join(extra)}, which Model's has not")
    parameters = {name for name, _ in model.named_parameters()}
    ours_parameters = {name for name, _ in candidate.named_parameters()}
    for name in theirs:
        if name not in ours or not isinstance(theirs[name], torch.Tensor):  # get_extra_state()
            continue
        if (name in parameters) != (name in ours_parameters):
            faults.append(f"{name} is a parameter in only one of Model and ModelNew")
        elif theirs[name].shape != ours[name].shape or theirs[name].dtype != ours[name].dtype:
            faults.append(
                f"{name} is {tuple(ours[name].shape)} {ours[name].dtype} in ModelNew, "
                f"{tuple(theirs[name].shape)} {theirs[name].dtype} in Model"
            )
        elif not same_bits(theirs[name], ours[name]):
            faults.append(f"{name} differs at the same seed; initial values must be bitwise equal")
    return faults


def line(check: Check) -> str:
    """One check as a line of text."""
    verdict = "ok" if check.passed else "FAILED"
    return (
        f"{check.what}: error {check.ours.frobenius:.1e} / {check.ours.componentwise:.1e}, "
        f"PyTorch {check.torch.frobenius:.1e} / {check.torch.componentwise:.1e}, "
        f"ratio to allowed {check.ratio:.2f}: {verdict}"
    )


def _compare(
    problem: Problem,
    model: nn.Module,
    candidate: nn.Module,
    inputs: list[Any],
    data: str,
    training: bool,
    seed: int,
    label: str,
    tier: Tier,
) -> list[Check]:
    if data in DISTRIBUTIONS:
        tensors = found(inputs)
        where = tensors[0].device if tensors else torch.device("cpu")
        generator = torch.Generator(where).manual_seed(seed)
        draw_weights(model, data, generator)
        inputs = mapped(
            lambda t: draw(data, t.shape, t, generator) if t.is_floating_point() else t, inputs
        )
    try:
        candidate.load_state_dict(model.state_dict())
    except (Exception, SystemExit) as error:
        return [failure(f"{label}: ModelNew.load_state_dict raised {describe(error)}")]
    try:
        return compare_models(
            model,
            candidate,
            inputs,
            label=label,
            training=training,
            seed=seed,
            limit=tier.limit,
        )
    except (Exception, SystemExit) as error:
        raise ProblemError(f"{problem.path}: Model failed in {label}: {describe(error)}") from error


def _cpu_batch(inputs: list[Any]) -> int:
    rows = [
        tensor.numel() // tensor.shape[0]
        for tensor in found(inputs)
        if tensor.ndim and tensor.numel()
    ]
    return max(2, min(CPU_BATCH, CPU_ELEMENTS // max(rows, default=1)))


def _cut(inputs: list[Any], batch: int | None) -> tuple[list[Any], str]:
    """Cut the leading dimension that all tensors share."""
    sizes = {tensor.shape[0] for tensor in found(inputs) if tensor.ndim > 0}
    if batch is None or len(sizes) != 1 or (size := sizes.pop()) <= batch:
        return inputs, ""
    cut = mapped(lambda tensor: tensor[:batch] if tensor.ndim > 0 else tensor, inputs)
    return cut, f"inputs cut from {size} to {batch} along their leading dimension (--batch)"


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ProblemError(f"--device {name}: {describe(error)}") from error
    if device.type not in ("cpu", "cuda"):
        raise ProblemError(f"--device {name}: cpu or cuda is needed")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ProblemError(f"--device {name}: this machine has {torch.cuda.device_count()} GPUs")
    return device


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return "the CPU"


def _report(result: Verification, out: TextIO) -> Verification:
    for fault in result.faults:
        print(f"  {fault}: FAILED", file=out)
    worst = max((check.ratio for check in result.checks), default=0.0)
    failures = len(result.faults) + sum(not check.passed for check in result.checks)
    if result.passed:
        print(f"PASSED: {len(result.checks)} checks, worst error {worst:.2f} of allowed", file=out)
    else:
        print(f"FAILED: {failures} of {len(result.faults) + len(result.checks)} checks", file=out)
    return result
