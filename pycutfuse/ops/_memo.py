"""The recipe that one module used last, and whether its next call may use it again.

Reading the facts of a tensor from Python costs 0.3 us; torch's own guard looks at the class,
dispatch keys (negation and wrappers among them), dtype, device, sizes and strides of all tensors
of a call in 0.2 us. It is private to torch, so it is tried before it is trusted.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pycutfuse.ops import _launch
from pycutfuse.program import EMPTY, MAX_STEPS, Encoded

Found = TypeVar("Found")
_Check = Callable[..., bool]
Replay = Callable[[torch.nn.Module, Tensor], Tensor | None]


def _apart(function: Callable[[], Found]) -> Found:
    """What `function` returns in a thread of its own.

    The first call may import this module inside a transform of torch.func, a FakeTensorMode or the
    like, which would take hold of the tensors made here. They hold for one thread each.
    """
    with ThreadPoolExecutor(1) as other:
        return other.submit(function).result()


def _absent() -> list[Tensor]:
    return [torch.empty(0, dtype=torch.complex64, device="cpu") for _ in range(5 + 3 * MAX_STEPS)]


# They stand for None in a check, by position, as it fails where a tensor is given twice. No tensor
# of a planned call has their dtype. Their address is null, as that of None.
ABSENT = _apart(_absent)


def guard(tensors: Sequence[Tensor]) -> _Check:
    guards: Any = torch._C._dynamo.guards
    made = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    check: _Check = made.check
    return check


def _works(made: Callable[[Sequence[Tensor]], _Check]) -> bool:
    """Whether `made` sees what it must in this version of torch."""
    empty = partial(torch.empty, dtype=torch.float32, device="cpu")  # whatever the defaults are
    one, other = empty(2, 3), empty(3)
    negative = empty(2, 3, dtype=torch.complex64).conj().imag
    positive = empty(2, 3, 2)[..., 0]
    unlike = (
        empty(2, 4),
        empty(3, 2).t(),
        empty(6),
        one.double(),
        one.to(torch.int32),
        one.clone().requires_grad_(),
        empty(2, 3, device="meta"),
        torch.nn.Parameter(one),
        ABSENT[0],
    )
    try:
        check = made((one, other))
        return (
            check(one.clone(), other.clone())
            and not any(check(tensor, other) or check(one, tensor) for tensor in unlike)
            and not check(None, other)
            and made((negative,))(negative)
            and not made((negative,))(positive)
        )
    except Exception:  # renamed, removed or changed: it is only a shortcut
        return False


def present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [ABSENT[at] if tensor is None else tensor for at, tensor in enumerate(tensors)]


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return getattr(tensor, "dtype", None)


class _Entry(NamedTuple):
    recipe: _launch.Recipe
    program: Encoded
    tier: str
    tail: str
    after: Encoded
    size: int
    absent: tuple[int, ...]
    generation: object
    check: _Check


class Memo:
    """The last recipe of a call site. Threads may share it: an entry is replaced as a whole."""

    __slots__ = ("_asked", "_entry", "_last", "replay")

    trusted = _apart(partial(_works, guard))
    _cached: Callable[..., Any] = staticmethod(_launch.cached)  # of this kind of recipe

    def __init__(self) -> None:
        self._entry: _Entry | None = None
        self._last: _launch.Recipe | None = None
        self._asked = 0  # how often `is_due` was, of the entry
        self.replay: Replay | None = None

    def __deepcopy__(self, memo: object) -> "Memo":
        return type(self)()  # a parametrized module's own copy would copy the plan

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()

    def forget_replay(self) -> None:
        """Drop the replay, which keeps alive what it compares; another one is recorded soon."""
        self._asked, self.replay = 0, None

    def is_due(self) -> bool:
        """Whether to record a replay after a call that was not one: after the 1st, 2nd, 4th, ..."""
        self._asked += 1
        return self._entry is not None and self._asked & (self._asked - 1) == 0

    def hit(
        self,
        tensors: list[Any],
        program: Encoded,
        tier: str,
        tail: str = "none",
        after: Encoded = EMPTY,
    ) -> _launch.Recipe | None:
        """The recipe of the two calls before this one, if this is like them.

        `tensors` then have stand-ins in place of None, which may be launched as well.
        """
        entry = self._entry
        if entry is None:
            return None
        recipe, its_program, its_tier, its_tail, its_after, size, absent, its_time, check = entry
        if (
            its_program is not program
            or its_tier != tier
            or its_tail != tail
            or its_after is not after
            or its_time is not _launch.generation
            or size != len(tensors)
        ):
            return None
        for at in absent:
            if tensors[at] is not None:
                return None
            tensors[at] = ABSENT[at]
        return recipe if check(*tensors) else None

    def find(
        self,
        tensors: Sequence[Tensor | None],
        program: Encoded,
        tier: str,
        tail: str = "none",
        after: Encoded = EMPTY,
    ) -> _launch.Recipe | _launch.Refusal | None:
        """As `_launch.cached`, and faster for a call like the two before it."""
        recipe = self.hit(list(tensors), program, tier, tail, after)
        if recipe is not None:
            return recipe
        if program.biased and _dtype(tensors[3]) is not _dtype(tensors[1]):
            return None  # torch raises; a step of that dtype would promote
        generation = _launch.generation  # before the look-up: it may be cleared in between
        found: _launch.Recipe | _launch.Refusal | None
        found = self._cached(tensors, program, tier, tail, after)
        if found is None or isinstance(found, _launch.Refusal):
            return found
        seen_before = found is self._last
        if seen_before and self.trusted:
            absent = tuple(at for at, tensor in enumerate(tensors) if tensor is None)
            head = (found, program, tier, tail, after, len(tensors), absent, generation)
            self._entry = _Entry(*head, guard(present(tensors)))
            self._asked, self.replay = 0, None
        self._last = found
        return found
