"""logsumexp: the raw operator, its autograd function, and the functional API."""

import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pycutfuse import _library, config, reference, support
from pycutfuse._knobs import knobs
from pycutfuse._loader import native
from pycutfuse.ops import _gate, _launch, _workspace
from pycutfuse.ops._frozen import raw_stream

if TYPE_CHECKING:
    from pycutfuse._C import LogSumExpPlan

NAME = "logsumexp"
MAX_RECIPES = 4096
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # cutfuse::DType
HAND_OVER = 'precision="torch"'


@dataclass(frozen=True, slots=True)
class Recipe:
    """One planned launch, without its addresses."""

    plan: "LogSumExpPlan"
    run: Any  # _C.logsumexp
    index: int
    device: torch.device
    out_shape: tuple[int, ...]
    dtype: torch.dtype
    workspace_bytes: int


def dims_of(x: Tensor, dim: int | Sequence[int]) -> tuple[int, ...]:
    """Dimensions that `dim` names, none of them negative; empty for a 0-dim tensor.

    Raises
    ------
    IndexError, RuntimeError, TypeError
        As torch.

    Examples
    --------
    >>> dims_of(torch.ones(2, 3, 4), (0, -1))
    (0, 2)
    """
    count = x.dim()
    limit = max(count, 1)
    found: list[int] = []
    for item in dim if isinstance(dim, (tuple, list)) else (dim,):
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            raise TypeError(
                f"logsumexp: dim is {dim!r}, which holds a {type(item).__name__}; "
                "it must be an int or a tuple of ints"
            )
        at = operator.index(item)
        if not -limit <= at < limit:
            raise IndexError(
                f"logsumexp: dim {at} is out of range for x of shape {tuple(x.shape)}; "
                f"it must be from {-limit} to {limit - 1}"
            )
        at %= limit
        if at in found:
            raise RuntimeError(
                f"logsumexp: dim {at} appears multiple times in {dim!r} (x has {count} "
                "dimensions); name each once"
            )
        found.append(at)
    return tuple(found) if count else ()


def out_shape_of(x: Tensor, dims: Sequence[int], keepdim: bool) -> tuple[int, ...]:
    """Shape of the result."""
    if keepdim:
        return tuple(1 if at in dims else size for at, size in enumerate(x.shape))
    return tuple(size for at, size in enumerate(x.shape) if at not in dims)


def why_reference(x: Tensor, dims: Sequence[int]) -> str | None:
    """Say why torch must run, with its own autograd, or None; see `_gate.why_reference`."""
    kind = type(x)
    if kind not in _gate._PLAIN and kind.__name__ not in _gate._TRACED:
        return f"tensor subclass {kind.__name__}"
    if x.dtype not in CODES:
        return f"dtype {x.dtype}".replace("torch.", "")
    if x.layout is not torch.strided:
        return f"layout {x.layout}".replace("torch.", "")
    if not dims and x.dim() > 0:
        return "no dimension to reduce"
    if not (x.is_cuda or x.is_cpu or x.is_meta):
        return f"{x.device.type} tensors"
    return _gate.why_state((x,))


def decide(x: Tensor, dims: Sequence[int], keepdim: bool, wide: bool) -> "Recipe | _launch.Refusal":
    """Plan a valid call of a CUDA tensor, without launching anything."""
    index = x.get_device()
    problem = support.device_problem(index)
    if problem is not None:
        return _launch.Refusal(problem, True)
    dtype = torch.float32 if wide else x.dtype
    binding = native().binding
    try:
        plan = binding.plan_logsumexp(
            tuple(x.shape),
            x.stride(),
            sum(1 << at for at in dims),
            CODES[x.dtype],
            CODES[dtype],
            support.device_props(index),
        )
    except NotImplementedError as error:
        return _launch.Refusal(str(error), False)
    out_shape = out_shape_of(x, dims, keepdim)
    head = (plan, binding.logsumexp, index, x.device, out_shape)
    return Recipe(*head, dtype, plan.workspace_bytes)


_recipes: dict[Any, "Recipe | _launch.Refusal"] = {}
_lock = threading.Lock()


def clear_cache() -> None:
    """Forget all recipes."""
    with _lock:
        _recipes.clear()


def _key(x: Tensor, dims: Sequence[int], keepdim: bool, wide: bool) -> tuple[Any, ...]:
    facts = (x.__class__, x.dtype, x.shape, x.stride(), x.get_device())
    return (*facts, x.is_neg(), x._is_zerotensor(), tuple(dims), keepdim, wide)


def lookup(x: Tensor, dims: Sequence[int], keepdim: bool, wide: bool) -> "Recipe | _launch.Refusal":
    """`decide`, remembered by the call's metadata."""
    key = _key(x, dims, keepdim, wide)
    found = _recipes.get(key)
    if found is not None:
        return found
    made = decide(x, dims, keepdim, wide)
    if _gate.is_plain((x,)):
        with _lock:
            if len(_recipes) >= MAX_RECIPES:
                _recipes.clear()
            _recipes[key] = made
    return made


def launch(recipe: Recipe, x: Tensor) -> Tensor:
    """Launch on the current stream; nothing that synchronises."""
    stream = raw_stream(recipe.index)
    out = knobs.empty(*(recipe.out_shape or (1,)), dtype=recipe.dtype, device=recipe.device)
    if not recipe.out_shape:
        out.squeeze_(0)
    workspace_at, owner = 0, None
    if recipe.workspace_bytes:
        workspace_at, owner = _workspace.allocate(
            recipe.workspace_bytes, recipe.index, recipe.device, stream
        )
    try:
        recipe.run(recipe.plan, x.data_ptr(), out.data_ptr(), workspace_at, stream)
    finally:
        if workspace_at and owner is None:
            _workspace.release(workspace_at)
    return out


def _forward_cpu(x: Tensor, dims: list[int], keepdim: bool, wide: bool) -> Tensor:
    config.report_fallback(NAME, "cpu tensors")
    return reference.logsumexp(x, dims, keepdim, wide).contiguous()


def _forward_cuda(x: Tensor, dims: list[int], keepdim: bool, wide: bool) -> Tensor:
    found = lookup(x, dims, keepdim, wide)
    if isinstance(found, Recipe):
        return launch(found, x)
    _launch.report(NAME, found)
    return reference.logsumexp(x, dims, keepdim, wide).contiguous()


def _forward_fake(x: Tensor, dims: list[int], keepdim: bool, wide: bool) -> Tensor:
    dtype = torch.float32 if wide else x.dtype
    return x.new_empty(out_shape_of(x, dims, keepdim), dtype=dtype)


_forward_op = _library.define(
    "logsumexp",
    "(Tensor x, int[] dims, bool keepdim, bool wide) -> Tensor",
    cpu=_forward_cpu,
    cuda=_forward_cuda,
    fake=_forward_fake,
)


class LogSumExpFunction(torch.autograd.Function):
    """Records `logsumexp`. Backward is torch's own formula, differentiable as often as torch's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dims: tuple[int, ...],
        keepdim: bool,
        wide: bool,
        recipe: Recipe | None,
    ) -> Tensor:
        out: Tensor = launch(recipe, x) if recipe else _forward_op(x, dims, keepdim, wide)
        ctx.save_for_backward(x, out)
        ctx.missing = () if keepdim else tuple(sorted(dims))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, out = ctx.saved_tensors
        for at in ctx.missing:
            grad, out = grad.unsqueeze(at), out.unsqueeze(at)
        of_x = (grad * (x - out).exp()).to(x.dtype)
        return of_x, None, None, None, None


_apply = _gate.plain_apply(LogSumExpFunction)


def check(x: Tensor, dim: int | Sequence[int], keepdim: bool) -> tuple[int, ...]:
    """`dims_of` a call, all arguments checked."""
    if not isinstance(x, Tensor):
        raise TypeError(f"logsumexp: x is a {type(x).__name__}; it must be a Tensor")
    if not isinstance(keepdim, bool):
        raise TypeError(f"logsumexp: keepdim is a {type(keepdim).__name__}; it must be a bool")
    return dims_of(x, dim)


def logsumexp(x: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    r"""Logarithm of the sum of exponentials over dimensions, as ``torch.logsumexp``.

    ``out = log(sum(exp(x), dim))``, computed relative to the maximum in one read of x.

    Parameters
    ----------
    x : Tensor
        ``(*)``, any strides.
    dim : int or sequence of int
        Dimensions to reduce; negative ones count from the last.
    keepdim : bool
        Keep reduced dimensions with size 1.

    Returns
    -------
    Tensor
        Shape of x without `dim`, contiguous, of x's dtype; float32 for float16 and bfloat16 CUDA
        tensors under autocast. float32, float16 and bfloat16 CUDA tensors run fused, with float32
        arithmetic; for all others torch runs.

    Raises
    ------
    IndexError
        If a dimension is out of range.
    RuntimeError
        If a dimension is named twice.
    TypeError
        If an argument has another type.

    Notes
    -----
    As in torch: -inf where all elements are -inf or there are none, inf where one is inf, NaN where
    one is NaN; the gradient is ``grad * exp(x - out)``. Deterministic. Source: Milakov and
    Gimelshein, "Online normalizer calculation for softmax", 2018.

    Examples
    --------
    >>> import torch, pycutfuse as pcf
    >>> x = torch.tensor([[0.0, 0.0], [1000.0, 1000.0]])
    >>> pcf.ops.logsumexp(x, dim=1)
    tensor([6.9315e-01, 1.0007e+03])
    """
    dims = check(x, dim, keepdim)
    handed_over = config.current_precision() == "torch"
    if not handed_over and x.is_cuda and _gate.is_plain_eager():
        recipe = _cached(x, dims, keepdim)
        if recipe is not None:
            if x.requires_grad and torch.is_grad_enabled():
                recorded: Tensor = _apply(x, dims, keepdim, False, recipe)
                return recorded
            return launch(recipe, x)
    reason = why_reference(x, dims)
    if reason is not None:
        config.report_fallback(NAME, reason)
        return reference.logsumexp(x, dims, keepdim)
    if handed_over:
        config.count_handover(NAME, HAND_OVER)
        return reference.logsumexp(x, dims, keepdim)
    wide = is_wide(x)
    out: Tensor
    if x.requires_grad and torch.is_grad_enabled():
        function: Any = LogSumExpFunction
        out = function.apply(x, dims, keepdim, wide, None)
    else:
        out = _forward_op(x, dims, keepdim, wide)
    return out


def is_wide(x: Tensor) -> bool:
    """Whether autocast asks for float32: torch lists logsumexp there for CUDA, not for the CPU."""
    return x.is_cuda and x.dtype is not torch.float32 and torch.is_autocast_enabled("cuda")


def _cached(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Recipe | None:
    try:
        found = _recipes.get(_key(x, dims, keepdim, False))
    except RuntimeError:  # a sparse tensor has no strides
        return None
    return found if isinstance(found, Recipe) else None
