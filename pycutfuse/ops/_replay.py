"""Calls that a module makes again and again: what decides on them, recorded for `_C.replay`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _modules

from pycutfuse import config
from pycutfuse._knobs import knobs
from pycutfuse._loader import native
from pycutfuse.ops import _frozen, _gate, _launch, _memo, _workspace

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STATE = (
    *_gate.STATE,
    torch.is_grad_enabled,
    _workspace._current_device,
    _workspace._is_deterministic,
)

Source = tuple[dict[str, Any], str] | None  # where a tensor is read; None: the module's argument


class Seen:
    """What decides on a module's call, the metadata of its tensors apart.

    Objects are compared by identity, what functions return by value.
    """

    def __init__(self) -> None:
        self.items: list[Any] = []  # dictionary, key and object in turn
        self.empties: list[Any] = []  # containers
        self.calls: list[Any] = []  # callable, arguments and result in turn

    def read(self, namespace: dict[str, Any], *keys: str) -> None:
        """Entries of `namespace`, or that there are none."""
        for key in keys:
            self.items += [namespace, key, namespace.get(key, ...)]

    def empty(self, namespace: dict[str, Any], *keys: str) -> None:
        """Containers in `namespace` that are empty."""
        self.read(namespace, *keys)
        self.empties += [namespace[key] for key in keys]

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """What `function` returns."""
        self.calls += [function, arguments, function(*arguments)]

    def child(self, module: nn.Module) -> None:
        """A module whose forward is not called: its class, and nothing that would be called."""
        own = module.__dict__
        self.call(type, module)
        self.empty(own, *_HOOKS)
        self.read(own, "forward", "_parameters", "_buffers", "_modules")

    def state(self, precision: str | None) -> None:
        """The state of torch, of this thread and of this package; `precision` is the module's."""
        self.read(forward_ad.__dict__, "_current_level")
        self.read(_launch.__dict__, "generation")
        self.read(knobs.__dict__, "promotion", "empty")
        self.empty(_modules.__dict__, *(f"_global{name}" for name in _HOOKS))
        for function in _STATE:
            self.call(function)
        for question in config.tier_questions(precision):
            self.call(*question)


class _Parts(NamedTuple):
    """As `Part` in cpp/bindings/replay.cc."""

    module: nn.Module
    items: tuple[Any, ...]
    empties: tuple[Any, ...]
    calls: tuple[Any, ...]
    sources: tuple[Any, ...]
    check: Callable[..., bool]
    raw_stream: Callable[[int], int]
    device: int
    order: Callable[..., None] | None
    words: Tensor | None
    blank: _workspace.Blank
    out: tuple[Any, ...]
    save: tuple[Any, ...] | None
    allocate: Callable[[int, int], int]
    release: Callable[[int], None]
    workspace_bytes: int
    moments_at: int | None
    run: Callable[..., None]
    momentum: float
    eps: float
    promotion: float
    apply: Callable[..., Any] | None
    settings: Any
    recorded: tuple[int, ...]


def record(
    module: nn.Module,
    seen: Seen,
    sources: Sequence[Source],
    tensors: Sequence[Any],
    recipe: _launch.Recipe,
    words: Tensor | None = None,
    momentum: float = 0.0,
    eps: float = 0.0,
    apply: Callable[..., Any] | None = None,
    settings: Any = None,
    recorded: Sequence[int] = (),
) -> _memo.Replay | None:
    """What makes this call again, or None if it takes more than a launch.

    `tensors` are those of `_launch.cached`, read at `sources`. For autograd, `apply` is called with
    result and moments of the batch, `settings`, and the tensors at the positions `recorded`.
    """
    allocate, index = _workspace._allocate, recipe.index
    if (
        not _memo.Memo.trusted
        or allocate is None
        or recipe.blank is None
        or not recipe.in_place
        or recipe.aligned  # 16-bit tensors, whose addresses decide
        or not _workspace.is_direct(index)
    ):
        return None
    read: list[Any] = []
    for at, (source, tensor) in enumerate(zip(sources, tensors, strict=True)):
        if tensor is None and source is not None:
            seen.read(*source)
        read.append(_memo.ABSENT[at] if tensor is None else source)
    n = recipe.problem.n
    saves = apply is not None and recipe.moments_at is not None
    return native().binding.replay(  # type: ignore[no-any-return]
        _Parts(
            module,
            tuple(seen.items),
            tuple(seen.empties),
            tuple(seen.calls),
            tuple(read),
            _memo.guard(_memo.present(tensors)),
            _frozen.raw_stream,
            index,
            _frozen.order if recipe.frozen else None,
            words,
            recipe.blank,
            (recipe.out_shape, recipe.out_strides, recipe.dtype),
            ((2, n), (n, 1), torch.float32) if saves else None,
            allocate,
            _workspace.release,
            recipe.workspace_bytes,
            recipe.moments_at,
            recipe.run,
            momentum,
            eps,
            knobs.promotion,
            apply,
            settings,
            tuple(-1 if tensors[at] is None else at for at in recorded),
        )
    )
