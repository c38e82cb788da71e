"""From a convolution's tensors to a launch: decided once for each kind of call, then looked up."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pycutfuse import support
from pycutfuse._knobs import knobs
from pycutfuse._loader import native
from pycutfuse.geometry import memory_format
from pycutfuse.ops import _conv_call, _conv_layout, _conv_packed, _gate, _launch, _workspace
from pycutfuse.ops._conv_call import Call
from pycutfuse.ops._frozen import raw_stream
from pycutfuse.ops._launch import MAX_RECIPES, Refusal
from pycutfuse.ops._layout import ALIGNMENT, Operands, addresses
from pycutfuse.program import EMPTY
from pycutfuse.support import ConvProblem

if TYPE_CHECKING:
    from pycutfuse._C import ConvPlan, ConvPolicy


@dataclass(frozen=True, slots=True)
class ConvRecipe:
    """One planned launch, without its addresses."""

    problem: ConvProblem
    plan: "ConvPlan"
    run: Any  # _C.run_conv
    index: int
    device: torch.device
    dtype: torch.dtype
    out_shape: tuple[int, ...]
    workspace_bytes: int  # the plan's, rounded up, and moment_bytes
    moment_bytes: int
    copies_x: bool
    x_strides: tuple[int, ...]  # after that
    weight_strides: tuple[int, ...]
    operands: Operands  # the bias first, if there is one
    after_operands: Operands
    norm_dtypes: tuple[int, int]  # of the batch norm's parameters, and of its statistics
    by_pixels: bool  # whether operands lie as the rows of a matrix of pixels
    aligned: bool  # whether x and weight are read in place where they start at 16 bytes


def _problem(call: Call, shape: tuple[int, ...], tier: str, channels_last: bool) -> ConvProblem:
    geometry, dtype = call.geometry, call.x.dtype
    batch = shape[0] if len(shape) == 4 else 1
    program = call.program if call.bias is None else _conv_call.with_bias(call.program)
    return ConvProblem._make(
        (
            batch,
            *call.x.shape[-3:],
            shape[-3],
            *call.weight.shape[2:],
            *geometry.stride,
            *geometry.padding[:2],
            *geometry.dilation,
            geometry.groups,
            *shape[-2:],
            geometry.transposed,
            program,
            _conv_call.tail(call),
            _conv_call.after(call),
            tier if dtype is torch.float32 else "ieee",
            dtype,
            False,  # packed
            channels_last,
            _conv_layout.pixel_stride(call.x, call.weight, channels_last),
            call.x.get_device(),
        )
    )


def decide(call: Call, tier: str) -> ConvRecipe | Refusal:
    """Validate the call and plan it, without launching anything.

    Raises
    ------
    RuntimeError, ValueError
        As torch, if the call is invalid.
    """
    _conv_call.check_dtypes(call)
    shape = _conv_call.check(call)
    x, weight, bias = call[:3]
    own = () if bias is None else (bias,)
    everything = (*own, *call.operands, *_conv_call.after_operands(call))
    reason = _launch._check_tensors(x, weight, everything, _conv_call.statistics(call.norm))
    reason = reason or support.device_problem(x.get_device()) or support.conv_missing()
    if reason is not None:
        return Refusal(reason, True)
    if 0 in shape or 0 in x.shape or 0 in weight.shape:
        return Refusal("an empty problem", False)
    _check_snapshot(call)
    read = _conv_layout.x_strides(x)
    if read is None:
        return Refusal(_conv_layout.SPAN_REASON, False)
    channels_last = memory_format(x, weight, call.geometry) is torch.channels_last
    problem = _problem(call, shape, tier, channels_last)
    reason = support.conv_why_not(problem) or support.conv_why_slower(problem)
    if reason is not None:
        return Refusal(reason, False)
    plan = _plan(problem)
    if call.snapshot is not None and plan.packed_bytes > 0:
        problem = problem._replace(packed=True)
        plan = _plan(problem, plan.policy)
    direct = plan.policy.tile_n == 0 and plan.policy.direct != 0
    product = plan.policy.tile_n == 0 and not direct
    source = plan.policy.gemm.source if product else 0
    gathers = direct or source != 0
    by_pixels = (product and not gathers) or (gathers and channels_last)
    lay_out = _conv_layout.by_any_planes if direct else _conv_layout.by_planes
    lay_out = _conv_layout.by_pixels if by_pixels else lay_out
    inner = lay_out(bias, call.operands, shape, channels_last)
    outer = lay_out(None, _conv_call.after_operands(call), shape, channels_last)
    for found in (inner, outer):
        if isinstance(found, str):
            return Refusal(found, True)
    assert isinstance(inner, Operands)
    assert isinstance(outer, Operands)
    moment_bytes = 8 * problem.out_channels if _conv_call.tail(call) == "batch_norm_train" else 0
    return ConvRecipe(
        problem,
        plan,
        native().binding.run_conv,
        problem.ordinal,
        x.device,
        x.dtype,
        shape,
        _arena(plan, moment_bytes),
        moment_bytes,
        *read,
        (weight if call.snapshot is None else call.snapshot).stride(),
        inner,
        outer,
        _launch._norm_dtypes(_conv_call.statistics(call.norm)),
        by_pixels,
        source == 2 or (product and problem.pixel_stride > 0 and x.dtype is not torch.float32),
    )


def _check_snapshot(call: Call) -> None:
    snapshot, weight = call.snapshot, call.weight
    if snapshot is None:
        return
    kind = (snapshot.shape, snapshot.dtype, snapshot.device)
    if kind != (weight.shape, weight.dtype, weight.device):
        raise RuntimeError(
            f"a frozen weight of shape {tuple(snapshot.shape)} ({snapshot.dtype} on "
            f"{snapshot.device}) does not belong to one of shape {tuple(weight.shape)} "
            f"({weight.dtype} on {weight.device}): it changed after freeze; call pycutfuse.unfreeze"
        )


def _arena(plan: "ConvPlan", moment_bytes: int) -> int:
    return -(-plan.workspace_bytes // 16) * 16 + moment_bytes


_plans: dict[Any, "ConvPlan"] = {}
_recipes: dict[Any, ConvRecipe | Refusal] = {}
_lock = threading.Lock()
_generation: object = _launch.generation


def _follow_generation() -> None:
    """Forget what was decided before `_launch.clear_caches`."""
    global _generation
    if _generation is not _launch.generation:
        with _lock:
            _generation = _launch.generation
            _plans.clear()
            _recipes.clear()


def _plan(problem: ConvProblem, policy: "ConvPolicy | None" = None) -> "ConvPlan":
    """A plan by `policy`, else by the one that is forced or selected."""
    policy = policy or knobs.conv_policy
    key = (*problem.key, repr(policy))
    plan = _plans.get(key)
    if plan is None:
        plan = support.make_conv_plan(problem, policy)
        with _lock:
            if len(_plans) >= MAX_RECIPES:
                _plans.clear()
            _plans[key] = plan
    return plan


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    # All strides, even of contiguous tensors: those of size one say which memory format torch sees.
    return (
        tensor.__class__,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.get_device(),
        tensor.is_neg(),
        tensor._is_zerotensor(),  # without memory
    )


def _key(call: Call, tier: str) -> tuple[Any, ...]:
    tensors = _conv_call.tensors(call)
    facts = [None if tensor is None else _facts(tensor) for tensor in tensors]
    programs = (call.program.key, _conv_call.after(call).key)
    return tier, _conv_call.tail(call), call.geometry, *programs, *facts


def cached(call: Call, tier: str) -> ConvRecipe | Refusal | None:
    """What was decided of a call like this one, None if there was none."""
    if _generation is not _launch.generation:
        _follow_generation()
    try:
        return _recipes.get(_key(call, tier))
    except (AttributeError, RuntimeError, ValueError):  # no tensor, or without strides
        return None


def lookup(call: Call, tier: str) -> ConvRecipe | Refusal:
    """`decide` at `tier` ("ieee" or "tf32"), remembered by the call's metadata."""
    found = cached(call, tier)
    if found is not None:
        return found
    made = decide(call, tier)
    if _gate.is_plain(_conv_call.tensors(call)):
        with _lock:
            if len(_recipes) >= MAX_RECIPES:
                _recipes.clear()
            _recipes[_key(call, tier)] = made
    return made


def bare(call: Call) -> Call:
    """The convolution of `call` with its bias alone."""
    return call._replace(snapshot=None, program=EMPTY, operands=(), norm=None)


def lookup_bare(call: Call, tier: str) -> ConvRecipe | Refusal:
    """A launch of ``bare(call)`` by the policy of `call`, so that both round alike."""
    found = lookup(call, tier)
    if isinstance(found, Refusal):
        return found
    program = EMPTY if call.bias is None else _conv_call.with_bias(EMPTY)
    problem = found.problem._replace(program=program, tail="none", after=EMPTY, packed=False)
    plan = _plan(problem, found.plan.policy)
    inner = _conv_layout.by_planes(call.bias, (), found.out_shape, problem.channels_last)
    assert isinstance(inner, Operands)
    return replace(
        found,
        problem=problem,
        plan=plan,
        workspace_bytes=_arena(plan, 0),
        moment_bytes=0,
        weight_strides=call.weight.stride(),
        operands=inner,
        after_operands=Operands([], (), found.out_shape),
        norm_dtypes=_launch._norm_dtypes(()),
    )


def _empty_out(recipe: ConvRecipe) -> Tensor:
    shape = recipe.out_shape
    if not recipe.problem.channels_last:
        return knobs.empty(*shape, dtype=recipe.dtype, device=recipe.device)
    last = (*shape[:-3], *shape[-2:], shape[-3])
    made = knobs.empty(*last, dtype=recipe.dtype, device=recipe.device)
    return made.permute((0, 3, 1, 2) if len(shape) == 4 else (2, 0, 1))


def _norm_numbers(
    recipe: ConvRecipe, statistics: Sequence[Tensor | None], save: Tensor | None, workspace_at: int
) -> list[int]:
    numbers = [0 if tensor is None else tensor.data_ptr() for tensor in statistics]
    numbers += recipe.norm_dtypes
    if not recipe.moment_bytes:
        return [*numbers, 0, 0]
    # Where nobody asked for the batch's mean and 1 / std, they go to the workspace's end.
    mean = workspace_at + recipe.workspace_bytes - recipe.moment_bytes
    mean = mean if save is None else save.data_ptr()
    return [*numbers, mean, mean + 4 * recipe.problem.out_channels]


def _unpacked(recipe: ConvRecipe) -> ConvRecipe:
    """The same launch with the weight as it is."""
    problem = recipe.problem._replace(packed=False)
    plan = _plan(problem, recipe.plan.policy)
    arena = _arena(plan, recipe.moment_bytes)
    return replace(recipe, problem=problem, plan=plan, workspace_bytes=arena)


def _aligned(recipe: ConvRecipe, x: Tensor, weight: Tensor) -> tuple[ConvRecipe, Tensor, Tensor]:
    """The launch of copies that start where kernels read tensors in place."""
    weight = weight.clone()
    recipe = replace(recipe, weight_strides=weight.stride())  # gaps are not copied
    if x.dtype is torch.float32:
        return recipe, x.clone(), weight
    x = x.movedim(-3, -1).clone(memory_format=torch.contiguous_format).movedim(-1, -3)
    problem = recipe.problem._replace(pixel_stride=recipe.problem.channels)
    strides = x.stride() if x.dim() == 4 else (0, *x.stride())
    plan = _plan(problem, recipe.plan.policy)
    return replace(recipe, problem=problem, plan=plan, x_strides=strides), x, weight


def launch(recipe: ConvRecipe, call: Call, save: Tensor | None = None) -> Tensor:
    """Launch on the current stream: two allocations, nothing that synchronises.

    `save` (2, K) receives mean and 1 / std of the batch.
    """
    stream = raw_stream(recipe.index)
    x, weight, packed = call.x, call.weight, None
    if call.snapshot is not None:
        weight, plan = call.snapshot, recipe.plan if recipe.problem.packed else None
        packed = _conv_packed.use(weight, plan, recipe.index, stream)
        if plan is not None and packed is None:
            recipe = _unpacked(recipe)
    operands = call.operands if call.bias is None else (call.bias, *call.operands)
    after_operands, norm = _conv_call.after_operands(call), call.norm
    # Copies are kept by the names they replace until the launch is queued.
    if recipe.copies_x:
        x = x.contiguous()
    if recipe.aligned and (x.data_ptr() | weight.data_ptr()) % ALIGNMENT:
        recipe, x, weight = _aligned(recipe, x, weight)
    if recipe.operands.copies:
        operands = _conv_layout.copied(recipe.operands, operands, recipe.by_pixels)
    if recipe.after_operands.copies:
        after_operands = _conv_layout.copied(
            recipe.after_operands, after_operands, recipe.by_pixels
        )
    out = _empty_out(recipe)
    workspace_at, owner = 0, None
    if recipe.workspace_bytes:
        workspace_at, owner = _workspace.allocate(
            recipe.workspace_bytes, recipe.index, recipe.device, stream
        )
    numbers, momentum, eps = None, 0.0, 0.0
    if norm is not None:
        numbers = _norm_numbers(recipe, norm[:5], save, workspace_at)
        momentum, eps = norm.momentum, norm.eps
    try:
        recipe.run(
            recipe.plan,
            x.data_ptr(),
            recipe.x_strides,
            weight.data_ptr(),
            recipe.weight_strides,
            0 if packed is None else packed.data_ptr(),
            addresses(recipe.operands, operands) if operands else (),
            addresses(recipe.after_operands, after_operands) if after_operands else (),
            out.data_ptr(),
            numbers,
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
