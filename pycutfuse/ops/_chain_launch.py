"""Two linear layers and a logsumexp as one launch: the call, its plan, and its addresses."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pycutfuse import support
from pycutfuse._knobs import knobs
from pycutfuse._loader import native
from pycutfuse.ops import _gate, _launch, _layout, _workspace
from pycutfuse.ops._frozen import order, raw_stream
from pycutfuse.program import EMPTY, Encoded
from pycutfuse.support import Problem, dtype_code

if TYPE_CHECKING:
    from pycutfuse._C import ChainPlan

NAME = "linear_linear_logsumexp"
TAIL = "chain"  # in keys
MAX_RECIPES = 4096


class Layer(NamedTuple):
    """One contraction: program(x @ weight.T)."""

    weight: Tensor
    planes: Tensor | None
    words: Tensor | None
    program: Encoded
    operands: Sequence[Tensor]


class Call(NamedTuple):
    """Arguments of one call; `flat` and `of_flat` convert to and from the operator's schema."""

    x: Tensor
    first: Layer
    second: Layer
    precision: str


# Functions and no properties or methods: torch.compile knows those of a named tuple from 2.11 on.


def tensors(call: Call) -> tuple[Tensor | None, ...]:
    """What a plan depends on."""
    first, second = call.first, call.second
    own = (call.x, first.weight, first.planes, *first.operands)
    return (*own, second.weight, second.planes, *second.operands)


def differentiable(call: Call) -> tuple[Tensor, ...]:
    """All tensors besides x and the first weight, in the order of the gradients."""
    return (*call.first.operands, call.second.weight, *call.second.operands)


def flat(call: Call) -> tuple[Any, ...]:
    """In the order of the schema."""
    parts: list[Any] = [call.x]
    for weight, planes, words, program, operands in (call.first, call.second):
        parts += (weight, planes, words, program.codes, program.constants, operands)
    return (*parts, call.precision)


def _layer(
    weight: Any, planes: Any, words: Any, codes: Any, constants: Any, operands: Any
) -> Layer:
    return Layer(weight, planes, words, Encoded(tuple(codes), tuple(constants)), operands)


def of_flat(arguments: Sequence[Any]) -> Call:
    """`flat` undone."""
    first, second = _layer(*arguments[1:7]), _layer(*arguments[7:13])
    return Call(arguments[0], first, second, arguments[13])


def check(call: Call) -> None:
    """Raise, as the plain chain, unless the call's shapes fit."""
    x, first, second, _ = call
    _gate.check_linear(x, first.weight)
    hidden = (*x.shape[:-1], *first.weight.shape[:-1])
    _gate.check_operands(hidden, first.operands, "first program")
    if second.weight.dim() != 2 or second.weight.shape[1] != first.weight.shape[0]:
        raise RuntimeError(
            f"second weight has shape {tuple(second.weight.shape)} but the first layer has "
            f"{first.weight.shape[0]} features; it needs (out_features, {first.weight.shape[0]})"
        )
    logits = (*x.shape[:-1], second.weight.shape[0])
    _gate.check_operands(logits, second.operands, "second program")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One planned launch, without its addresses."""

    problems: tuple[Problem, Problem]
    plan: "ChainPlan"
    run: Any  # _C.run_chain
    device: torch.device
    code: int  # of the dtype
    out_shape: tuple[int, ...]
    workspace_bytes: int
    x: _layout.View
    weights: tuple[_layout.View, _layout.View]
    operands: tuple[_layout.Operands, _layout.Operands]
    in_place: bool  # whether kernels can read x and both weights at any address


def decide(call: Call, tier: str) -> Recipe | _launch.Refusal:
    """Validate the call and plan it, without launching anything.

    Raises
    ------
    RuntimeError
        As torch, if the call is invalid.
    """
    check(call)
    x, first, second, _ = call
    others = (second.weight, *first.operands, *second.operands)
    reason = _launch._check_tensors(x, first.weight, others, ())
    if reason is None and second.weight.dtype is not x.dtype:
        reason = f"dtype {second.weight.dtype}".replace("torch.", "")
    index = x.get_device()
    reason = reason or support.device_problem(index)
    if reason is not None:
        return _launch.Refusal(reason, True)
    m, (hidden, k), n = math.prod(x.shape[:-1]), first.weight.shape, second.weight.shape[0]
    if 0 in (m, k, hidden, n):
        return _launch.Refusal("an empty problem", False)
    views = [_layout.factor_view(tensor) for tensor in (x, first.weight, second.weight)]
    narrow = x.dtype is not torch.float32
    leading = [view.row_stride if narrow else 0 for view in views]
    kind = ("ieee" if narrow else tier, x.dtype, False)
    problems = (
        Problem(m, hidden, k, first.program, "none", EMPTY, *kind, leading[0], leading[1], index),
        Problem(m, n, hidden, second.program, "logsumexp", EMPTY, *kind, 0, leading[2], index),
    )
    binding, props = native().binding, support.device_props(index)
    reason = binding.why_not_chain(*map(support.fused_problem, problems), props)
    if reason is not None:
        return _launch.Refusal(reason, False)
    frozen = [
        _launch._uses_planes(layer.planes, problem, x.device)
        for layer, problem in zip((first, second), problems, strict=True)
    ]
    problems = (problems[0]._replace(frozen=frozen[0]), problems[1]._replace(frozen=frozen[1]))
    reason = support.why_slower(*problems)
    if reason is not None:
        return _launch.Refusal(reason, False)
    rows = x.shape[:-1]
    operands = (
        _layout.operands_of(first.operands, (*rows, hidden)),
        _layout.operands_of(second.operands, (*rows, n)),
    )
    plan, code = _plan(problems), dtype_code(x.dtype)
    head = (problems, plan, binding.run_chain, x.device, code, tuple(rows), plan.workspace_bytes)
    in_place = not (narrow or any(view.copy for view in views))
    return Recipe(*head, views[0], (views[1], views[2]), operands, in_place)


_plans: dict[Any, "ChainPlan"] = {}
_recipes: dict[Any, Recipe | _launch.Refusal] = {}
_lock = threading.Lock()


def _plan(problems: tuple[Problem, Problem]) -> "ChainPlan":
    key = (_launch.generation, problems[0].key, problems[1].key)
    plan = _plans.get(key)
    if plan is None:
        props = support.device_props(problems[0].ordinal)
        plan = native().binding.make_chain(*map(support.fused_problem, problems), props)
        with _lock:
            if len(_plans) >= MAX_RECIPES:
                _plans.clear()
            _plans[key] = plan
    return plan


def _key(
    tensors: Sequence[Tensor | None], program: Encoded, tier: str, tail: str, after: Encoded
) -> Any:
    return _launch.generation, _launch._key(tensors, program, tier, tail, after)


def cached(
    tensors: Sequence[Tensor | None], program: Encoded, tier: str, tail: str, after: Encoded
) -> Recipe | _launch.Refusal | None:
    """What was decided of a call like this one; see `_launch.cached`.

    `tensors` are those of `tensors`, `program` and `after` the programs of both layers.
    """
    try:
        return _recipes.get(_key(tensors, program, tier, tail, after))
    except (AttributeError, RuntimeError):  # no tensor, or a sparse one, which has no strides
        return None


def lookup(call: Call, tier: str) -> Recipe | _launch.Refusal:
    """`decide`, remembered by the call's metadata."""
    given = tensors(call)
    key = _key(given, call.first.program, tier, TAIL, call.second.program)
    found = _recipes.get(key)
    if found is not None:
        return found
    made = decide(call, tier)
    if _gate.is_plain(given):
        with _lock:
            if len(_recipes) >= MAX_RECIPES:
                _recipes.clear()
            _recipes[key] = made
    return made


def _moved(tensor: Tensor, view: _layout.View, narrow: bool) -> tuple[Tensor, int]:
    """`tensor` where a kernel can read it, and its row stride."""
    stride = view.row_stride
    if view.copy:
        tensor = _layout.copy_rows(tensor, stride)
    if narrow and tensor.data_ptr() % _layout.ALIGNMENT:
        stride = _layout.padded(tensor.shape[-1])
        tensor = _layout.copy_rows(tensor, stride)
    return tensor, stride


def _readable(recipe: Recipe, call: Call) -> tuple["ChainPlan", Call, list[int]]:
    """A plan and a call that kernels can read, and the row strides of x and both weights."""
    narrow = recipe.code != 0
    x, first, second, precision = call
    tensors = (x, first.weight, second.weight)
    pairs = [
        _moved(tensor, view, narrow)
        for tensor, view in zip(tensors, (recipe.x, *recipe.weights), strict=True)
    ]
    x, weight, second_weight = (tensor for tensor, _ in pairs)
    strides = [stride for _, stride in pairs]
    plan, problems = recipe.plan, recipe.problems
    if narrow:
        present = (
            problems[0]._replace(x_leading=strides[0], weight_leading=strides[1]),
            problems[1]._replace(weight_leading=strides[2]),
        )
        plan = plan if present == problems else _plan(present)
    first, second = first._replace(weight=weight), second._replace(weight=second_weight)
    return plan, Call(x, first, second, precision), strides


def _weight_numbers(
    layer: Layer, view: _layout.View, stride: int, problem: Problem, stream: int
) -> tuple[int, ...]:
    planes, words = layer.planes, layer.words
    planes_at = words_at = 0
    if problem.frozen and planes is not None and words is not None:
        planes_at, words_at = planes.data_ptr(), words.data_ptr()
        order(planes, words, problem.ordinal, stream)
    return layer.weight.data_ptr(), stride, view.col_stride, planes_at, words_at


def launch(recipe: Recipe, call: Call) -> Tensor:
    """Launch on the current stream; nothing that synchronises."""
    problems, plan, views = recipe.problems, recipe.plan, recipe.weights
    index = problems[0].ordinal
    stream = raw_stream(index)
    # Copies are kept by the names they replace until the launch is queued.
    if recipe.in_place:
        strides = [recipe.x.row_stride, views[0].row_stride, views[1].row_stride]
    else:
        plan, call, strides = _readable(recipe, call)
    x, first, second, _ = call
    layouts = recipe.operands
    operands, second_operands = first.operands, second.operands
    if layouts[0].copies:
        operands = _layout.copied(layouts[0], operands)
    if layouts[1].copies:
        second_operands = _layout.copied(layouts[1], second_operands)
    out = knobs.empty(*(recipe.out_shape or (1,)), dtype=x.dtype, device=recipe.device)
    if not recipe.out_shape:
        out.squeeze_(0)
    size = recipe.workspace_bytes if plan is recipe.plan else plan.workspace_bytes
    workspace_at, owner = _workspace.allocate(size, index, recipe.device, stream)
    try:
        recipe.run(
            plan,
            recipe.code,
            x.data_ptr(),
            strides[0],
            recipe.x.col_stride,
            _weight_numbers(first, views[0], strides[1], problems[0], stream),
            _weight_numbers(second, views[1], strides[2], problems[1], stream),
            _layout.addresses(layouts[0], operands),
            _layout.addresses(layouts[1], second_operands),
            out.data_ptr(),
            1,
            workspace_at,
            knobs.promotion,
            stream,
        )
    finally:
        if owner is None:
            _workspace.release(workspace_at)
    return out
