"""One forward of two modules against float64: outputs, and buffers that training changes."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pycutfuse.bench.accuracy import Check, compare, failure, reference_with_scale, tensors
from pycutfuse.bench.flags import poisoned_allocations, without_cudnn
from pycutfuse.bench.nested import copied, doubled, found, same_bits
from pycutfuse.bench.problem import describe

NOTHING = "nothing compared"
DISTRIBUTIONS = ("rand", "randn", "lognormal")


def draw(
    distribution: str, shape: Sequence[int], like: Tensor, generator: torch.Generator
) -> Tensor:
    """A tensor of `shape` with dtype and device of `like`: rand, randn or lognormal(0, 1)."""
    out = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    if distribution == "rand":
        return out.uniform_(generator=generator)
    if distribution == "randn":
        return out.normal_(generator=generator)
    if distribution == "lognormal":
        return out.log_normal_(0.0, 1.0, generator=generator)
    raise ValueError(f"distribution {distribution!r} is none of {', '.join(DISTRIBUTIONS)}")


@torch.no_grad()
def draw_weights(model: nn.Module, distribution: str, generator: torch.Generator) -> None:
    """Fill every parameter of two or more dimensions, scaled so that results stay near one.

    Positive weights are divided by their fan-in, normal ones by its square root: larger results
    would saturate what follows (sigmoid, gelu) and hide the contraction's error.
    """
    for parameter in model.parameters():
        if parameter.ndim >= 2 and parameter.is_floating_point() and parameter.numel():
            fan_in = parameter[0].numel()
            scale = math.sqrt(fan_in) if distribution == "randn" else fan_in
            parameter.copy_(draw(distribution, parameter.shape, parameter, generator).div_(scale))


def set_mode(module: nn.Module, training: bool) -> None:
    """train() or eval(), unless it already is: on a frozen module the call would drop planes."""
    if module.training != training:
        module.train(training)


def compare_models(
    model: nn.Module,
    candidate: nn.Module,
    inputs: Sequence[Any],
    *,
    label: str,
    training: bool,
    seed: int = 0,
    limit: float | None = None,
    cudnn: bool = True,
) -> list[Check]:
    """Run `model`, `candidate` and a float64 copy of `model` on equal inputs and judge them.

    Each has the inputs to itself; what `candidate` alone changes of them, or of its parameters and
    buffers, is a failed check. Both modules must hold equal parameters and buffers. In training
    mode the buffers that change (running statistics) are judged as well, and both modules keep
    their changed buffers.

    Parameters
    ----------
    label : str
        Names the data in each check.
    seed : int
        Set before each forward, so that random steps agree.
    limit : float, optional
        As that of `pycutfuse.bench.accuracy.compare`.
    cudnn : bool
        Whether cuDNN may convolve in float64. Its kernels may take any amount of workspace.

    Raises
    ------
    Exception
        Whatever `model` raises. What `candidate` raises is a failed check.
    """
    exact = copy.deepcopy(model).double()
    for module in (model, exact):
        set_mode(module, training)
    with nullcontext() if cudnn else without_cudnn():
        references, scales = _reference(exact, inputs, seed)
    theirs, they_changed = _run(model, inputs, seed)
    theirs = [tensor.clone() for tensor in theirs]
    try:
        set_mode(candidate, training)
        with poisoned_allocations():
            ours, we_changed = _run(candidate, inputs, seed)
    except (Exception, SystemExit) as error:
        return [failure(f"{label}: raised {describe(error)}")]
    if len(ours) != len(theirs):
        return [failure(f"{label}: {len(ours)} outputs, PyTorch has {len(theirs)}")]
    names = ["output"] if len(ours) < 2 else [f"output {i}" for i in range(len(ours))]
    checks = [
        compare(f"{label}: {names[i]}", ours[i], theirs[i], references[i], scales[i], limit)
        for i in range(len(ours))
    ]
    if all(check.passed for check in checks):
        checks += _vacuous(theirs, [f"{label}: {name}" for name in names])
    checks += [
        failure(f"{label}: {name} was changed, and not by PyTorch")
        for name in we_changed
        if name not in they_changed
    ]
    del ours, theirs, references, scales
    return checks + (_compare_buffers(model, candidate, exact, label, limit) if training else [])


def _vacuous(results: list[Tensor], names: list[str]) -> list[Check]:
    """Failures for outputs of PyTorch that say nothing, though they are equal to ours."""
    if not any(result.numel() for result in results):
        return [failure(f"{names[0]} ({NOTHING}: the result is empty)")]
    return [
        failure(f"{name} ({NOTHING}: no element is finite)")
        for name, result in zip(names, results, strict=True)
        if result.numel() and not torch.isfinite(result).any()
    ]


@torch.no_grad()
def _run(module: nn.Module, inputs: Sequence[Any], seed: int) -> tuple[list[Tensor], list[str]]:
    """Outputs for a copy of the inputs; and which inputs, parameters and buffers were changed."""
    own = copied(inputs)
    before = {f"input {i}": tensor for i, tensor in enumerate(found(inputs))}
    before |= {name: tensor.clone() for name, tensor in _state(module).items()}
    torch.manual_seed(seed)
    outputs = tensors(module(*own))
    after = {f"input {i}": tensor for i, tensor in enumerate(found(own))} | _state(module)
    changed = [n for n in before if n not in after or not same_bits(before[n], after[n])]
    return outputs, changed


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def _reference(
    exact: nn.Module, inputs: Sequence[Any], seed: int
) -> tuple[list[Tensor], list[Tensor | None]]:
    buffers = copy.deepcopy(dict(exact.named_buffers()))
    torch.manual_seed(seed)
    try:
        outputs, scales = reference_with_scale(lambda: exact(*doubled(inputs)))
        return outputs, list(scales)
    except NotImplementedError:  # an operator without forward-mode differentiation
        with torch.no_grad():
            for name, buffer in exact.named_buffers():
                buffer.copy_(buffers[name])
            torch.manual_seed(seed)
            outputs = tensors(exact(*doubled(inputs)))
        return outputs, [None] * len(outputs)


def _compare_buffers(
    model: nn.Module, candidate: nn.Module, exact: nn.Module, label: str, limit: float | None
) -> list[Check]:
    theirs, ours = model.state_dict(), candidate.state_dict()
    references = exact.state_dict()
    checks = []
    for name, _ in model.named_buffers():
        if name not in theirs:
            continue
        what = f"{label}: {name}"
        checks.append(compare(what, ours[name], theirs[name], references[name], None, limit))
    return checks
