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
    ALIGNMENT,
    Operands,
    View,
    any_view,
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

__all__ = ["copied", "copy_rows", "dtype_code", "operands_of", "precision_code"]

_F32 = torch.float32
SMALL = 1  # arch of policies that read any strides in 16 bits, too
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
    run: Any  # of _C.bind
    index: int
    device: torch.device
    dtype: torch.dtype
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    blank: _workspace.Blank | None
    workspace_bytes: int  # the plan's, rounded up, and moments of the batch
    moments_at: int | None  # where they begin in the workspace
    x: View
    weight: View
    in_place: bool  # whether nothing is copied
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
        raise RuntimeError(_gate.mixed_devices(x, tensor))
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
    made, *rows = planes.shape
    fits = rows == [n, 2 * native().binding.planes_layout(n, k, 1)[0]]
    if not fits or planes.device != device or problem.dtype is not _F32:
        raise RuntimeError(
            f"frozen planes of shape {tuple(planes.shape)} on {planes.device} do not belong to a "
            f"weight of shape {(n, k)} on {device}: it changed after freeze; call "
            "pycutfuse.unfreeze"
        )
    return made >= plane_count(problem.dtype, problem.tier)


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
    inner, outer = operands_of(operands, shape), operands_of(after_operands, shape)
    norm_dtypes = _norm_dtypes(batch_norm)
    plan, out_shape = _plan(problem), shape[:-1] if tail == "logsumexp" else shape
    aligned = narrow and plan.policy.arch != SMALL
    if narrow and not aligned:
        views = any_view(x), any_view(weight)
        problem = problem._replace(x_leading=0, weight_leading=0)
        plan = _plan(problem)
    scratch, saves = -(-plan.workspace_bytes // 16) * 16, tail == "batch_norm_train"
    return Recipe(
        problem,
        plan,
        _bind(plan, problem, *views, inner, outer, norm_dtypes),
        index,
        x.device,
        dtype,
        out_shape,
        tuple(math.prod(out_shape[at + 1 :]) for at in range(len(out_shape))),
        _workspace.blank_of(x.device.type),
        scratch + (8 * n if saves else 0),
        scratch if saves else None,
        *views,
        not (views[0].copy or views[1].copy or inner.copies or outer.copies),
        aligned,
        frozen,
        inner,
        outer,
        norm_dtypes,
    )


def _bind(
    plan: "Plan",
    problem: Problem,
    x: View,
    weight: View,
    operands: Operands,
    after_operands: Operands,
    norm_dtypes: tuple[int, int],
) -> Any:
    strides = (x.row_stride, x.col_stride, weight.row_stride, weight.col_stride)
    programs = (operands.flat, after_operands.flat)
    return native().binding.bind(plan, *strides, *programs, problem.n, *norm_dtypes)


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
        tensor._is_zerotensor(),  # without memory
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
    except (AttributeError, RuntimeError, ValueError):  # no tensor, or without strides
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


def _moved(recipe: Recipe, tensor: Tensor, view: View) -> tuple[Tensor, View, int]:
    """x or weight where a kernel can read it, and the elements between rows that its plan names."""
    if view.copy:
        tensor = copy_rows(tensor, view.row_stride)
    if not recipe.aligned:
        return tensor, view, 0
    if tensor.data_ptr() % ALIGNMENT:
        view = View(padded(recipe.problem.k), 1, True)
        tensor = copy_rows(tensor, view.row_stride)
    return tensor, view, view.row_stride


def _readable(recipe: Recipe, tensors: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """The launch, and copies among `tensors` of those that kernels cannot read in place.

    A 16-bit x or weight that starts at an odd address has another plan.
    """
    inner, outer, found = recipe.operands, recipe.after_operands, list(tensors)
    found[0], x, x_leading = _moved(recipe, found[0], recipe.x)
    found[1], weight, weight_leading = _moved(recipe, found[1], recipe.weight)
    begin, end = 3 + len(inner.flat) // 4, len(found) - len(outer.flat) // 4
    found[3:begin] = copied(inner, found[3:begin])
    found[end:] = copied(outer, found[end:])
    problem = recipe.problem._replace(x_leading=x_leading, weight_leading=weight_leading)
    if problem == recipe.problem:
        return recipe.run, found
    run = _bind(_plan(problem), problem, x, weight, inner, outer, recipe.norm_dtypes)
    return run, found


def launch(
    recipe: Recipe,
    tensors: Sequence[Any],
    words: Any = None,
    momentum: float = 0.0,
    eps: float = 0.0,
    save: Tensor | None = None,
) -> Tensor:
    """Launch on the current stream: two allocations, nothing that synchronises.

    `tensors` are those of `cached`; the batch norm's are weight, bias, running_mean, running_var
    and num_batches_tracked. `save` (2, N) receives mean and 1 / std of the batch.
    """
    index, run = recipe.index, recipe.run
    stream = raw_stream(index)
    if not recipe.in_place or (
        recipe.aligned and (tensors[0].data_ptr() | tensors[1].data_ptr()) % ALIGNMENT
    ):
        # Copies are kept by this name until the launch is queued.
        run, tensors = _readable(recipe, tensors)
    if recipe.frozen:
        order(tensors[2], words, index, stream)
    direct = _workspace.is_direct(index)
    if direct and recipe.blank is not None:
        out = recipe.blank(recipe.out_shape, recipe.out_strides, recipe.dtype)
    else:
        # Sizes one by one: torch takes half as long again to read a tuple of them.
        out = knobs.empty(*(recipe.out_shape or (1,)), dtype=recipe.dtype, device=recipe.device)
        if not recipe.out_shape:
            out.squeeze_(0)
    workspace_at, owner = 0, None
    if recipe.workspace_bytes:
        size, device = recipe.workspace_bytes, recipe.device
        workspace_at, owner = _workspace.scratch(size, device, stream, direct)
    saved: Any = save
    if save is None and recipe.moments_at is not None:
        saved = workspace_at + recipe.moments_at
    try:
        run(out, saved, workspace_at, words, momentum, eps, knobs.promotion, stream, tensors)
    finally:
        if workspace_at and owner is None:
            _workspace.release(workspace_at)
    return out
