"""From tensors to a launch: what a call's metadata allows, planned once and then looked up.

Everything that can be known without reading memory is decided once for each combination of shapes,
strides, dtypes, devices, tiers and programs, and kept as a `Recipe` or a `Refusal`.
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pycutfuse import config, support
from pycutfuse._knobs import knobs
from pycutfuse._loader import native
from pycutfuse.ops import _gate, _workspace
from pycutfuse.ops._frozen import order, raw_stream
from pycutfuse.ops._layout import (
    Operands,
    View,
    addresses,
    copied,
    copy_rows,
    factor_view,
    operands_of,
    padded,
)
from pycutfuse.program import EMPTY, Encoded
from pycutfuse.support import Problem, dtype_code, plane_count, precision_code

if TYPE_CHECKING:
    from pycutfuse._C import Plan

__all__ = ["addresses", "copied", "copy_rows", "dtype_code", "operands_of", "precision_code"]

_F32 = torch.float32
MAX_RECIPES = 4096  # about 2 KB each; a model with varying batch sizes may fill it


@dataclass(frozen=True, slots=True)
class Refusal:
    """Torch runs the call: a fallback if it is unsupported, else a hand-over."""

    reason: str
    fallback: bool


@dataclass(frozen=True, slots=True)
class Recipe:
    """One planned launch, without its addresses."""

    problem: Problem
    plan: "Plan"
    run: Any  # _C.run
    index: int
    device: torch.device
    dtype: torch.dtype
    out_shape: tuple[int, ...]
    n: int
    workspace_bytes: int  # the plan's, rounded up, and moment_bytes
    moment_bytes: int
    x: View
    weight: View
    aligned: bool  # whether x and weight must start at a multiple of 16 bytes
    frozen: bool  # whether planes of the weight are used
    operands: Operands
    after_operands: Operands
    norm_dtypes: tuple[int, int]  # of the batch norm's parameters, and of its statistics


def _check_tensors(
    x: Tensor, weight: Tensor, operands: Sequence[Tensor], batch_norm: Sequence[Tensor | None]
) -> str | None:
    dtype = x.dtype
    if dtype not in support.DTYPES or weight.dtype is not dtype:
        return f"dtype {weight.dtype if dtype in support.DTYPES else dtype}".replace("torch.", "")
    for tensor in (weight, *operands, *batch_norm):
        if tensor is None or tensor.device == x.device:
            continue
        if tensor.is_cpu and tensor.dim() == 0:
            return "a 0-dim operand on the CPU"
        raise RuntimeError(
            f"expected all tensors to be on the same device: x is on {x.device} but a tensor "
            f"of shape {tuple(tensor.shape)} is on {tensor.device}; move one with .to(device)"
        )
    for tensor in batch_norm:
        if tensor is not None and not tensor.is_contiguous():
            return "batch-norm tensors that are not contiguous"
    return _gate.why_operands(dtype, operands) or _gate.why_statistics(dtype, batch_norm)


def _uses_planes(planes: Tensor | None, problem: Problem, device: torch.device) -> bool:
    """Whether the frozen planes serve this tier. Raises RuntimeError if they are not the weight's.

    The first of two planes is the one plane of the tf32 tier.
    """
    if planes is None:
        return False
    n, k = problem.n, problem.k
    layout = native().binding.planes_layout
    made = [count for count in (1, 2) if planes.numel() == layout(n, k, count)[1]]
    if not made or planes.device != device or problem.dtype is not _F32:
        raise RuntimeError(
            f"frozen planes of {planes.numel()} bytes on {planes.device} do not belong to a weight "
            f"of shape {(n, k)} on {device}: it changed after freeze; call pycutfuse.unfreeze"
        )
    return made[0] >= plane_count(problem.dtype, problem.tier)


def _norm_dtypes(batch_norm: Sequence[Tensor | None]) -> tuple[int, int]:
    """Of weight and bias, and of running_mean and running_var; `why_statistics` is None."""
    found = []
    for pair in (batch_norm[0:2], batch_norm[2:4]):
        present = [dtype_code(tensor.dtype) for tensor in pair if tensor is not None]
        found.append(present[0] if present else 0)
    return found[0], found[1]


def decide(
    x: Tensor,
    weight: Tensor,
    planes: Tensor | None,
    program: Encoded,
    operands: Sequence[Tensor],
    tail: str,
    batch_norm: Sequence[Tensor | None],
    after: Encoded,
    after_operands: Sequence[Tensor],
    tier: str,
) -> Recipe | Refusal:
    """Validate the call and plan it, without launching anything.

    Raises
    ------
    RuntimeError, ValueError
        As torch, if the call is invalid.
    """
    _gate.check_linear(x, weight)
    shape = (*x.shape[:-1], *weight.shape[:-1])
    _gate.check_operands(shape, operands, "program")
    _gate.check_operands(shape, after_operands, "program after the tail")
    reason = _check_tensors(x, weight, (*operands, *after_operands), batch_norm)
    index, dtype = x.get_device(), x.dtype
    reason = reason or support.device_problem(index)
    if reason is None and weight.dim() != 2:
        reason = f"a weight of {weight.dim()} dimensions"
    if reason is not None:
        return Refusal(reason, True)
    (n, k), m = weight.shape, math.prod(x.shape[:-1])
    if m == 0 or n == 0 or k == 0:
        return Refusal("an empty problem", False)
    views = factor_view(x), factor_view(weight)
    narrow = dtype is not _F32
    tier = "ieee" if narrow else tier
    leading = (views[0].row_stride, views[1].row_stride) if narrow else (0, 0)
    problem = Problem(m, n, k, program, tail, after, tier, dtype, False, *leading, index)
    reason = support.why_not(problem)
    if reason is not None:
        return Refusal(reason, False)
    frozen = _uses_planes(planes, problem, x.device)
    problem = problem._replace(frozen=frozen)
    reason = support.why_slower(problem)
    if reason is not None:
        return Refusal(reason, False)
    plan = _plan(problem)
    moment_bytes = 8 * n if tail == "batch_norm_train" else 0
    return Recipe(
        problem,
        plan,
        native().binding.run,
        index,
        x.device,
        dtype,
        shape[:-1] if tail == "logsumexp" else shape,
        n,
        -(-plan.workspace_bytes // 16) * 16 + moment_bytes,
        moment_bytes,
        *views,
        narrow,
        frozen,
        operands_of(operands, shape),
        operands_of(after_operands, shape),
        _norm_dtypes(batch_norm),
    )


_plans: dict[Any, "Plan"] = {}
_recipes: dict[Any, Recipe | Refusal] = {}
_lock = threading.Lock()
generation = object()  # another one after each clear_caches


def _plan(problem: Problem) -> "Plan":
    key = (*problem.key, repr(knobs.policy))
    plan = _plans.get(key)
    if plan is None:
        plan = support.make_plan(problem, knobs.policy)
        with _lock:
            if len(_plans) >= MAX_RECIPES:
                _plans.clear()
            _plans[key] = plan
    return plan


def clear_caches() -> None:
    """Forget all plans and recipes (a forced policy changed, or the library was replaced)."""
    global generation
    with _lock:
        generation = object()
        _plans.clear()
        _recipes.clear()


def report(operator: str, refusal: Refusal) -> None:
    """Count a refusal and follow the fallback policy."""
    if refusal.fallback:
        config.report_fallback(operator, refusal.reason)
    else:
        config.count_handover(operator, refusal.reason)


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    # Read anew at each call: `.data =`, `resize_` and the like change all of it under one object.
    # Contiguous tensors of one shape differ in no stride that is ever multiplied by more than 0.
    return (
        tensor.__class__,
        tensor.dtype,
        tensor.shape,
        tensor.is_contiguous() or tensor.stride(),
        tensor.get_device(),
        tensor.is_neg(),
    )


def _key(
    tensors: Sequence[Tensor | None], program: Encoded, tier: str, tail: str, after: Encoded
) -> tuple[Any, ...]:
    # Everything that a decision depends on, the tensors' classes and negation bits included, so
    # that a hit needs no further look at them.
    facts = [None if tensor is None else _facts(tensor) for tensor in tensors]
    return tier, tail, program.key, after.key, *facts


def cached(
    tensors: Sequence[Tensor | None],
    program: Encoded,
    tier: str,
    tail: str = "none",
    after: Encoded = EMPTY,
) -> Recipe | Refusal | None:
    """What was decided of a call like this one, None if there was none.

    `tensors` are x, weight, planes, the operands, the batch norm's and the operands after it.
    """
    try:
        return _recipes.get(_key(tensors, program, tier, tail, after))
    except (AttributeError, RuntimeError):  # no tensor, or a sparse one, which has no strides
        return None


def lookup(
    x: Tensor,
    weight: Tensor,
    planes: Tensor | None,
    program: Encoded,
    operands: Sequence[Tensor],
    tier: str,
    tail: str = "none",
    batch_norm: Sequence[Tensor | None] = (),
    after: Encoded = EMPTY,
    after_operands: Sequence[Tensor] = (),
) -> Recipe | Refusal:
    """`decide` at `tier` ("ieee" or "tf32"), remembered by the call's metadata."""
    tensors = (x, weight, planes, *operands, *batch_norm, *after_operands)
    key = _key(tensors, program, tier, tail, after)
    found = _recipes.get(key)
    if found is not None:
        return found
    given = (program, operands, tail, batch_norm, after, after_operands, tier)
    made = decide(x, weight, planes, *given)
    if _gate.is_plain(tensors):
        with _lock:
            if len(_recipes) >= MAX_RECIPES:
                _recipes.clear()
            _recipes[key] = made
    return made


def _realigned(
    recipe: Recipe, x: Tensor, weight: Tensor
) -> tuple["Plan", Tensor, int, Tensor, int]:
    """Plan, x and weight, each with its row stride, where a 16-bit one starts at an odd address."""
    problem, step = recipe.problem, padded(recipe.problem.k)
    if x.data_ptr() % 16:
        x, problem = copy_rows(x, step), problem._replace(x_leading=step)
    if weight.data_ptr() % 16:
        weight, problem = copy_rows(weight, step), problem._replace(weight_leading=step)
    return _plan(problem), x, problem.x_leading, weight, problem.weight_leading


def _norm_numbers(
    recipe: Recipe, batch_norm: Sequence[Tensor | None], save: Tensor | None, workspace_at: int
) -> list[int]:
    numbers = [0 if tensor is None else tensor.data_ptr() for tensor in batch_norm]
    numbers += recipe.norm_dtypes
    if not recipe.moment_bytes:
        numbers += (0, 0)
    else:
        # Where nobody asked for the batch's mean and 1 / std, they go to the workspace's end.
        mean = workspace_at + recipe.workspace_bytes - recipe.moment_bytes
        mean = mean if save is None else save.data_ptr()
        numbers += (mean, mean + 4 * recipe.n)
    return numbers


def launch(
    recipe: Recipe,
    x: Tensor,
    weight: Tensor,
    planes: Tensor | None,
    words: Tensor | None,
    operands: Sequence[Tensor],
    batch_norm: Sequence[Tensor | None] | None = None,
    momentum: float = 0.0,
    eps: float = 0.0,
    after_operands: Sequence[Tensor] = (),
    save: Tensor | None = None,
) -> Tensor:
    """Launch on the current stream: two allocations, nothing that synchronises.

    `batch_norm` holds weight, bias, running_mean, running_var and num_batches_tracked; `save`
    (2, N) receives mean and 1 / std of the batch.
    """
    stream = raw_stream(recipe.index)
    plan, x_view, weight_view = recipe.plan, recipe.x, recipe.weight
    x_stride, weight_stride = x_view.row_stride, weight_view.row_stride
    # Copies are kept by the names they replace until the launch is queued.
    if x_view.copy:
        x = copy_rows(x, x_stride)
    if weight_view.copy:
        weight = copy_rows(weight, weight_stride)
    x_at, weight_at = x.data_ptr(), weight.data_ptr()
    if recipe.aligned and (x_at | weight_at) & 15:
        plan, x, x_stride, weight, weight_stride = _realigned(recipe, x, weight)
        x_at, weight_at = x.data_ptr(), weight.data_ptr()
    if recipe.operands.copies:
        operands = copied(recipe.operands, operands)
    if recipe.after_operands.copies:
        after_operands = copied(recipe.after_operands, after_operands)
    # Sizes one by one: torch takes half as long again to read a tuple of them.
    out = knobs.empty(*(recipe.out_shape or (1,)), dtype=recipe.dtype, device=recipe.device)
    if not recipe.out_shape:
        out.squeeze_(0)
    workspace_at, owner = 0, None
    if recipe.workspace_bytes:
        workspace_at, owner = _workspace.allocate(
            recipe.workspace_bytes, recipe.index, recipe.device, stream
        )
    planes_at = words_at = 0
    if recipe.frozen and planes is not None and words is not None:
        planes_at, words_at = planes.data_ptr(), words.data_ptr()
        order(planes, words, recipe.index, stream)
    try:
        recipe.run(
            plan,
            x_at,
            x_stride,
            x_view.col_stride,
            weight_at,
            weight_stride,
            weight_view.col_stride,
            planes_at,
            words_at,
            addresses(recipe.operands, operands) if operands else (),
            addresses(recipe.after_operands, after_operands) if after_operands else (),
            out.data_ptr(),
            recipe.n,
            None if batch_norm is None else _norm_numbers(recipe, batch_norm, save, workspace_at),
            momentum,
            eps,
            workspace_at,
            knobs.promotion,
            stream,
        )
    finally:
        if workspace_at and owner is None:
            _workspace.release(workspace_at)
    return out
