"""What a user may set: precision tier, fallback policy; and the counters of both detours."""

import os
import sys
import threading
import warnings
from collections import Counter
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from pycutfuse.errors import FallbackError, FallbackWarning

Precision = Literal["ieee", "tf32", "torch"]
FallbackPolicy = Literal["warn once", "silent", "error"]

DEFAULT = "default"  # what crosses the dispatcher when nothing was set: torch's flags decide

PRECISIONS: tuple[str, ...] = get_args(Precision)
POLICIES: tuple[str, ...] = get_args(FallbackPolicy)


class _PrecisionState(threading.local):
    # Set per instance and not on the class: Dynamo guards the attribute only where it exists.
    def __init__(self) -> None:
        self.value: str = DEFAULT
        self.entered: tuple[precision, ...] = ()  # the last one decides


_precision = _PrecisionState()


def check_precision(value: str | None) -> None:
    """Raise ValueError unless `value` is None or a tier."""
    if value is not None and value not in PRECISIONS:
        raise ValueError(f"precision is {value!r}; use one of {', '.join(PRECISIONS)}, or None")


class precision:  # noqa: N801 - reads as a function where it is used
    """Context manager: the tier of every call of this thread whose own ``precision`` is None.

    Parameters
    ----------
    value : {"ieee", "tf32", "torch"} or None
        ``"ieee"``: error at most max(torch's fp32 error, 2^-22). ``"tf32"``: at most max(that of
        torch's TF32, 2^-10). ``"torch"``: hand over to torch. None: torch's flags decide, at each
        call. float16 and bfloat16 tensors are multiplied as they are at every tier but ``"torch"``.

    Raises
    ------
    ValueError
        For any other value.

    Examples
    --------
    >>> import pycutfuse as pcf
    >>> with pcf.precision("ieee"):
    ...     pass
    """

    def __init__(self, value: Precision | None) -> None:
        check_precision(value)
        self.value: str = DEFAULT if value is None else value

    def __enter__(self) -> None:
        _precision.entered = (*_precision.entered, self)
        _precision.value = self.value

    def __exit__(self, *_: object) -> None:
        # Not always the last one: tasks of asyncio leave theirs in any order.
        entered = _precision.entered
        for at in range(len(entered) - 1, -1, -1):
            if entered[at] is self:
                entered = entered[:at] + entered[at + 1 :]
                break
        _precision.entered = entered
        _precision.value = entered[-1].value if entered else DEFAULT


def current_precision() -> str:
    """Tier set by the innermost ``precision`` context of this thread, or ``"default"``."""
    return _precision.value


def _read_allow_tf32() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _read_conv_allow_tf32() -> str:
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def _read_fp32_precision() -> str:
    # Resolves "none" to the setting of the whole backend; "none" there means IEEE for matmul.
    value: str = torch._C._get_fp32_precision_getter("cuda", "matmul")
    return "tf32" if value == "tf32" else "ieee"


def _read_conv_fp32_precision() -> str:
    value: str = torch._C._get_fp32_precision_getter("cuda", "conv")
    return "tf32" if value == "tf32" else "ieee"


# Reading allow_tf32 raises once the new setting was used, so it is read only where that is missing.
_has_fp32_precision = hasattr(torch._C, "_get_fp32_precision_getter")
torch_tier = _read_fp32_precision if _has_fp32_precision else _read_allow_tf32
torch_conv_tier = _read_conv_fp32_precision if _has_fp32_precision else _read_conv_allow_tf32
for _read in (torch_tier, torch_conv_tier):
    _read._dynamo_marked_constant = True  # type: ignore[attr-defined]


def tier_questions(precision: str | None) -> list[tuple[Any, ...]]:
    """What the tier of a call with this precision depends on now: functions and arguments."""
    if precision is not None:
        return []
    of_thread = (attrgetter("value"), _precision)
    if _precision.value != DEFAULT:
        return [of_thread]
    if _has_fp32_precision:
        return [of_thread, (torch._C._get_fp32_precision_getter, "cuda", "matmul")]
    return [of_thread, (torch_tier,)]


def resolve_tier(value: str) -> str:
    """Tier that a call runs at: `value`, or for ``"default"`` what torch's flags say now."""
    return torch_tier() if value == DEFAULT else value


def resolve_conv_tier(value: str) -> str:
    """`resolve_tier` of a convolution: torch has flags of its own for them, TF32 by default."""
    return torch_conv_tier() if value == DEFAULT else value


class _Policy:
    def __init__(self) -> None:
        self.value: str = POLICIES[0]
        self.lock = threading.Lock()
        self.warned: set[str] = set()
        self.fallbacks: Counter[str] = Counter()
        self.handovers: Counter[str] = Counter()


_state = _Policy()


def set_fallback_policy(policy: FallbackPolicy) -> FallbackPolicy:
    """Say what an unsupported call does besides running the reference chain.

    Parameters
    ----------
    policy : {"warn once", "silent", "error"}
        Warn once for each operator and reason (default), say nothing, or raise
        `FallbackError` before anything runs. Holds for the whole process.

    Returns
    -------
    str
        The policy until now.

    Raises
    ------
    ValueError
        For any other value.

    Examples
    --------
    >>> import pycutfuse as pcf
    >>> outer = pcf.set_fallback_policy("silent")
    >>> pcf.set_fallback_policy(outer)
    'silent'
    """
    if policy not in POLICIES:
        raise ValueError(f"fallback policy is {policy!r}; use one of {', '.join(POLICIES)}")
    outer = _state.value
    _state.value = policy
    return outer  # type: ignore[return-value]


_OURS = tuple(str(Path(file).parent) + os.sep for file in (__file__, torch.__file__))


def _user_level() -> int:
    """The stacklevel, for our caller, of the innermost frame outside this package and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_code.co_filename.startswith(_OURS) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level


def report_fallback(operator: str, reason: str) -> None:
    """Count a fallback and follow the policy. Dynamo calls it while it traces."""
    key = f"{operator}: {reason}"
    if _state.value == "error":
        raise FallbackError(
            f"{key}; PyTorch would run instead, but the fallback policy is 'error'. "
            "pycutfuse.set_fallback_policy('warn once') allows it."
        )
    with _state.lock:
        _state.fallbacks[key] += 1
        if _state.value != "warn once" or key in _state.warned:
            return
        _state.warned.add(key)
    warnings.warn(f"{key}; PyTorch runs instead", FallbackWarning, stacklevel=_user_level())


def count_handover(operator: str, reason: str) -> None:
    """Count a supported call that torch runs."""
    with _state.lock:
        _state.handovers[f"{operator}: {reason}"] += 1


report_fallback._dynamo_marked_constant = True  # type: ignore[attr-defined]
count_handover._dynamo_marked_constant = True  # type: ignore[attr-defined]


def counters() -> dict[str, dict[str, int]]:
    """How often torch ran instead of a fused kernel, by operator and reason.

    Returns
    -------
    dict
        ``{"fallback": {reason: calls}, "handover": {reason: calls}}`` since the start or
        `reset_counters`. A call in a compiled graph that falls back while it is traced counts once.

    Examples
    --------
    >>> import pycutfuse as pcf
    >>> sorted(pcf.counters())
    ['fallback', 'handover']
    """
    with _state.lock:
        return {"fallback": dict(_state.fallbacks), "handover": dict(_state.handovers)}


def reset_counters() -> None:
    """Set all counters to zero and let each reason warn once more.

    Examples
    --------
    >>> import pycutfuse as pcf
    >>> pcf.reset_counters()
    >>> pcf.counters()
    {'fallback': {}, 'handover': {}}
    """
    with _state.lock:
        _state.warned.clear()
        _state.fallbacks.clear()
        _state.handovers.clear()
