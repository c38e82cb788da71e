"""From tensors to a launch: what a call's metadata allows, planned once and then looked up.

Everything that can be known without reading memory is decided once for each combination of shapes,
strides, dtypes, devices and programs, and kept as a `Recipe` or a `Refusal`.
"""

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
from pycutfuse.program import EMPTY, Encoded

if TYPE_CHECKING:
    from pycutfuse._C import Plan

_F32 = torch.float32
STATISTICS = 5  # addresses before save_mean and save_invstd in _C.run's batch_norm
MAX_RECIPES = 4096  # about 2 KB each; a model with varying batch sizes may fill it


@dataclass(frozen=True, slots=True)
class Refusal:
    """Torch runs the call: a fallback if it is unsupported, else a hand-over."""

    reason: str
    fallback: bool


@dataclass(frozen=True, slots=True)
class View:
    """How a kernel reads a tensor as an (M, N) matrix: strides in elements, after a copy or not."""

    row_stride: int
    col_stride: int
    copy: bool


@dataclass(frozen=True, slots=True)
class Recipe:
    """One planned launch, without its addresses."""

    plan: "Plan"
    run: Any  # _C.run
    index: int
    device: torch.device
    out_shape: tuple[int, ...]
    n: int
    workspace_bytes: int  # the plan's, rounded up, and moment_bytes
    moment_bytes: int
    x: View
    weight_strides: tuple[int, int]
    operands: "Operands"
    after_operands: "Operands"


@dataclass(frozen=True, slots=True)
class Operands:
    """What _C.run takes of a program's operands, addresses left 0; which are copied before it."""

    flat: list[int]  # address, row stride, column stride of each
    copies: tuple[int, ...]


def collapse(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int] | None:
    """Strides of a (.., N) tensor as an (M, N) matrix, None if its leading dimensions do not merge.

    Examples
    --------
    >>> collapse((4, 5, 6), (30, 6, 1))
    (6, 1)
    >>> collapse((4, 5, 6), (6, 24, 1)) is None
    True
    """
    row_stride, rows = 0, 1
    for size, step in zip(reversed(shape[:-1]), reversed(stride[:-1]), strict=True):
        if size == 1:
            continue
        if rows == 1:
            row_stride, rows = step, size
        elif step == row_stride * rows:
            rows *= size
        else:
            return None
    return row_stride, stride[-1]


def view_of(tensor: Tensor, out_shape: Sequence[int]) -> View:
    """How to read `tensor`, broadcast to `out_shape`, as a matrix."""
    expanded = tensor.expand(tuple(out_shape))
    strides = tuple(
        0 if size == 1 else step
        for size, step in zip(expanded.shape, expanded.stride(), strict=True)
    )
    merged = collapse(tuple(out_shape), strides)
    if merged is None:
        return View(out_shape[-1], 1, True)
    return View(*merged, False)


def _operands_of(operands: Sequence[Tensor], out_shape: Sequence[int]) -> Operands:
    views = [view_of(operand, out_shape) for operand in operands]
    flat = [number for view in views for number in (0, view.row_stride, view.col_stride)]
    return Operands(flat, tuple(at for at, view in enumerate(views) if view.copy))


def _check_tensors(x: Tensor, tensors: Sequence[Tensor | None]) -> str | None:
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype is not _F32:
            return f"dtype {tensor.dtype}".replace("torch.", "")
        if tensor.device != x.device:
            if tensor.is_cpu and tensor.dim() == 0:
                return "a 0-dim operand on the CPU"
            raise RuntimeError(
                f"expected all tensors to be on the same device: x is on {x.device} but a tensor "
                f"of shape {tuple(tensor.shape)} is on {tensor.device}; move one with .to(device)"
            )
    return None


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
) -> Recipe | Refusal:
    """Validate the call and plan it, without launching anything.

    Raises
    ------
    RuntimeError, ValueError
        As torch, if the call is invalid.
    """
    _gate.check_linear(x, weight)
    out_shape = (*x.shape[:-1], *weight.shape[:-1])
    _gate.check_operands(out_shape, operands, "program")
    _gate.check_operands(out_shape, after_operands, "program after the tail")
    problem = _check_tensors(x, (x, weight, *operands, *after_operands, *batch_norm[:4]))
    if problem is not None:
        return Refusal(problem, True)
    for tensor in batch_norm:
        if tensor is not None and not (tensor.is_contiguous() and tensor.device == x.device):
            return Refusal("batch-norm tensors that are elsewhere or not contiguous", True)
    index = x.get_device()
    problem = support.device_problem(index)
    if problem is not None:
        return Refusal(problem, True)
    if weight.dim() != 2:
        return Refusal(f"a weight of {weight.dim()} dimensions", True)
    n, k = weight.shape
    m = 1
    for size in x.shape[:-1]:
        m *= size
    if m == 0 or n == 0 or k == 0:
        return Refusal("an empty problem", False)
    problem = support.why_not(m, n, k, program, tail, after, index)
    if problem is not None:
        return Refusal(problem, False)
    if planes is not None and (
        planes.device != x.device or planes.numel() != native().binding.planes_layout(n, k)[1]
    ):
        raise RuntimeError(
            f"frozen planes of {planes.numel()} bytes on {planes.device} do not belong to a weight "
            f"of shape {(n, k)} on {x.device}: it changed after freeze; call pycutfuse.unfreeze"
        )
    merged = collapse(x.shape, x.stride())
    x_view = View(k, 1, True) if merged is None else View(*merged, False)
    plan = _plan(m, n, k, program, tail, after, planes is not None, index)
    moment_bytes = 8 * n if tail == "batch_norm_train" else 0
    return Recipe(
        plan,
        native().binding.run,
        index,
        x.device,
        out_shape,
        n,
        -(-plan.workspace_bytes // 16) * 16 + moment_bytes,
        moment_bytes,
        x_view,
        (weight.stride(0), weight.stride(1)),
        _operands_of(operands, out_shape),
        _operands_of(after_operands, out_shape),
    )


_plans: dict[Any, "Plan"] = {}
_recipes: dict[Any, Recipe | Refusal] = {}
_lock = threading.Lock()
generation = object()  # another one after each clear_caches


def _plan(
    m: int, n: int, k: int, program: Encoded, tail: str, after: Encoded, frozen: bool, index: int
) -> "Plan":
    key = (m, n, k, program.key, tail, after.key, frozen, index, repr(knobs.policy))
    plan = _plans.get(key)
    if plan is None:
        plan = support.make_plan(m, n, k, program, tail, after, frozen, index, knobs.policy)
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
    tensors: Sequence[Tensor | None], program: Encoded, tail: str, after: Encoded
) -> tuple[Any, ...]:
    # Everything that a decision depends on, the tensors' classes and negation bits included, so
    # that a hit needs no further look at them.
    facts = [None if tensor is None else _facts(tensor) for tensor in tensors]
    return tail, program.key, after.key, *facts


def cached(
    tensors: Sequence[Tensor | None], program: Encoded, tail: str = "none", after: Encoded = EMPTY
) -> Recipe | None:
    """The recipe of a call like one that was planned before, None if there was none.

    `tensors` are x, weight, planes, the operands, the batch norm's and the operands after it.
    """
    try:
        found = _recipes.get(_key(tensors, program, tail, after))
    except (AttributeError, RuntimeError):  # no tensor, or a sparse one, which has no strides
        return None
    return found if isinstance(found, Recipe) else None


def lookup(
    x: Tensor,
    weight: Tensor,
    planes: Tensor | None,
    program: Encoded,
    operands: Sequence[Tensor],
    tail: str = "none",
    batch_norm: Sequence[Tensor | None] = (),
    after: Encoded = EMPTY,
    after_operands: Sequence[Tensor] = (),
) -> Recipe | Refusal:
    """`decide`, remembered by the call's metadata."""
    tensors = (x, weight, planes, *operands, *batch_norm, *after_operands)
    key = _key(tensors, program, tail, after)
    found = _recipes.get(key)
    if found is not None:
        return found
    made = decide(x, weight, planes, program, operands, tail, batch_norm, after, after_operands)
    if _gate.is_plain(tensors):
        with _lock:
            if len(_recipes) >= MAX_RECIPES:
                _recipes.clear()
            _recipes[key] = made
    return made


_data_ptr = Tensor.data_ptr


def _copied(layout: Operands, operands: Sequence[Tensor], recipe: Recipe) -> list[Tensor]:
    copied = list(operands)
    for at in layout.copies:
        copied[at] = copied[at].expand(recipe.out_shape).contiguous()
    return copied


def _addresses(layout: Operands, operands: Sequence[Tensor]) -> list[int]:
    flat = layout.flat.copy()
    flat[::3] = map(_data_ptr, operands)
    return flat


def launch(
    recipe: Recipe,
    x: Tensor,
    weight: Tensor,
    planes: Tensor | None,
    words: Tensor | None,
    operands: Sequence[Tensor],
    batch_norm: list[int] | None = None,
    momentum: float = 0.0,
    eps: float = 0.0,
    after_operands: Sequence[Tensor] = (),
) -> Tensor:
    """Launch on the current stream: two allocations, nothing that synchronises.

    `batch_norm` holds the addresses that _C.run takes, or only those of the statistics.
    """
    stream = raw_stream(recipe.index)
    # Copies are kept by the names they replace until the launch is queued.
    if recipe.x.copy:
        x = x.contiguous()
    if recipe.operands.copies:
        operands = _copied(recipe.operands, operands, recipe)
    if recipe.after_operands.copies:
        after_operands = _copied(recipe.after_operands, after_operands, recipe)
    # Sizes one by one: torch takes half as long again to read a tuple of them.
    out = knobs.empty(*recipe.out_shape, dtype=_F32, device=recipe.device)
    workspace_at, owner = _workspace.allocate(
        recipe.workspace_bytes, recipe.index, recipe.device, stream
    )
    if batch_norm is not None and len(batch_norm) == STATISTICS:
        # Nobody asked for the batch's mean and 1 / std: they go to the end of the workspace.
        mean = workspace_at + recipe.workspace_bytes - recipe.moment_bytes
        batch_norm += (mean, mean + 4 * recipe.n) if recipe.moment_bytes else (0, 0)
    planes_at = words_at = 0
    if planes is not None and words is not None:
        planes_at, words_at = planes.data_ptr(), words.data_ptr()
        order(planes, words, recipe.index, stream)
    weight_strides = recipe.weight_strides
    try:
        recipe.run(
            recipe.plan,
            x.data_ptr(),
            recipe.x.row_stride,
            recipe.x.col_stride,
            weight.data_ptr(),
            weight_strides[0],
            weight_strides[1],
            planes_at,
            words_at,
            _addresses(recipe.operands, operands) if operands else (),
            _addresses(recipe.after_operands, after_operands) if after_operands else (),
            out.data_ptr(),
            recipe.n,
            batch_norm,
            momentum,
            eps,
            workspace_at,
            knobs.promotion,
            stream,
        )
    finally:
        if owner is None:
            _workspace.release(workspace_at)
    return out
