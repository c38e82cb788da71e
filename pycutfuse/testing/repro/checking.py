"""Make the call of a configuration and judge everything that it returns or raises."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pycutfuse import config as settings
from pycutfuse.testing.memory import GuardError
from pycutfuse.testing.repro import judge
from pycutfuse.testing.repro.calls import (
    flags,
    mistakes_of,
    operator_of,
    our_call,
    surroundings,
    torch_chain,
    walk_chain,
)
from pycutfuse.testing.repro.case import Case, make_case
from pycutfuse.testing.repro.config import Config
from pycutfuse.testing.repro.envelope import Rounding, as_rows
from pycutfuse.testing.repro.gradients import typical_errors
from pycutfuse.testing.repro.unchanged import changed, snapshot
from pycutfuse.testing.repro.watching import mechanisms

VERDICTS = ("correct", "rejected", "wrong", "crash", "unclean")
FAILURES = ("wrong", "crash", "unclean")
SAMPLES = 6  # runs of torch with perturbed inputs, beside the unperturbed one


@dataclass(frozen=True)
class Outcome:
    """What became of one seed.

    Attributes
    ----------
    verdict : str
        One of ``VERDICTS``: ``rejected`` is an invalid call that raised as it should,
        ``unclean`` one that did not, or a valid call that raised.
    detail : str
        What is wrong, in words.
    ratio, gradient_ratio : float
        The largest error of values over the promised one, and of gradients over torch's.
    detours : tuple of str
        Fallbacks and hand-overs with their reasons.
    mechanism : str
        By which the first convolution of ours was launched, in a plan's words; empty if none was.
    lost : bool
        The process cannot go on: the device is in a failed state.
    """

    seed: int
    verdict: str
    detail: str = ""
    ratio: float = 0.0
    gradient_ratio: float = 0.0
    detours: tuple[str, ...] = ()
    mechanism: str = ""
    lost: bool = False


@dataclass
class _Result:
    out: Any = None
    error: Exception | None = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    running: dict[str, Tensor] = field(default_factory=dict)


def check(config: Config, device: str | torch.device) -> Outcome:
    """Make the call of `config` on `device` and judge it. Raises nothing but on Ctrl-C."""
    where = torch.device(device)
    outer = settings.set_fallback_policy("silent")
    settings.reset_counters()
    launched: list[str] = []
    try:
        with flags(config.allow_tf32), mechanisms() as launched:
            found = _check(config, where)
    except Exception as error:
        found = _failure(config.seed, error, "the check itself raised")
    finally:
        counted = settings.counters()
        settings.set_fallback_policy(outer)
        settings.reset_counters()
    detours = tuple(f"{kind}: {reason}" for kind in counted for reason in counted[kind])
    return replace(found, detours=detours, mechanism=launched[0] if launched else "")


def _failure(seed: int, error: Exception, what: str) -> Outcome:
    text = f"{what}: {type(error).__name__}: {str(error).strip()[:600]}"
    if _is_device_error(error):
        return Outcome(seed, "crash", text, lost=True)
    return Outcome(seed, "wrong" if isinstance(error, GuardError) else "unclean", text)


def _is_device_error(error: Exception) -> bool:
    words = (
        r"CUDA error|CUBLAS_STATUS|illegal memory|misaligned|device-side assert|unspecified launch"
    )
    return type(error).__name__ == "AcceleratorError" or bool(re.search(words, str(error)))


def _settle(device: torch.device) -> None:
    """Let a failed device show: wait for it and compute something small."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if float(torch.ones(3, device=device).sum()) != 3.0:
        raise RuntimeError("CUDA error: 1 + 1 + 1 is not 3 after the call")


def _run(case: Case, call: Callable[[Case], Any], upstream: Tensor | None) -> _Result:
    """Run forward and, with `upstream`, backward; exceptions become part of the result."""
    result = _Result()
    wanted = case.config.backward if upstream is not None else ()
    try:
        with torch.set_grad_enabled(bool(wanted)):
            result.out = call(case)
        leaves = [case.tensors[name] for name in wanted]
        if wanted and result.out.requires_grad:
            found = torch.autograd.grad(result.out, leaves, upstream, allow_unused=True)
            result.gradients = dict(zip(wanted, found, strict=True))
    except Exception as error:
        result.error = error
    if case.statistics is not None:
        result.running = case.statistics.running()
    if isinstance(result.out, Tensor):
        result.out = result.out.detach()
    return result


def _ours(case: Case, upstream: Tensor | None) -> tuple[_Result, str | None]:
    """Our result, and what was written that should not be."""
    given, before = dict(case.tensors), snapshot(case.tensors)
    with surroundings(case):
        ours = _run(case, our_call, upstream)
        _settle(case.device)
    name = changed(given, before)
    return ours, None if name is None else f"{name} was written to"


def _check(config: Config, device: torch.device) -> Outcome:
    case = make_case(config, device)
    mistake = None if config.mistake is None else mistakes_of(config)[config.mistake]
    if mistake is not None:
        mistake.make(case)
    tier = config.precision
    tf32 = config.allow_tf32 if tier in (None, "torch") else tier == "tf32"

    def torchs(which: Case, upstream: Tensor | None) -> _Result:
        with flags(tf32):
            return _run(which, torch_chain, upstream)

    if mistake is not None and mistake.error is not None:
        return _check_rejection(case, mistake.error, None)
    first = torchs(case.leaves(), None)
    if first.error is not None:
        return _check_rejection(case, type(first.error), first)
    dtype = getattr(torch, config.x.dtype)
    on_cuda = device.type == "cuda"
    rounding = Rounding.of(dtype, "tf32" if tf32 and on_cuda else "ieee", config.k)
    walk, running = walk_chain(case.wide(), rounding)
    exact = whole = config.integers and walk.exact and rounding.floor == 2.0**-22
    upstream = _upstream(case, first.out, walk.unsure | walk.ambiguous, whole)
    own_case = case.leaves()
    ours, problem = _ours(own_case, upstream)
    if problem is not None:
        return Outcome(config.seed, "wrong", problem)
    if ours.error is not None:
        if upstream is not None:
            again = torchs(case.leaves(), upstream)
            if again.error is not None and type(again.error) is type(ours.error):
                return Outcome(config.seed, "rejected", "backward, as torch")
        return _failure(config.seed, ours.error, "a valid call raised")
    # Whole numbers that torch's algorithm transforms need not stay whole.
    if on_cuda and not operator_of(config).torch_is_definite:
        exact = exact and not any(settings.counters().values())
    outcome = _judge_values(config, ours, first, walk, running, exact)
    if outcome.verdict != "correct" or upstream is None:
        return outcome
    count = 0 if whole else SAMPLES
    samples = [torchs(case.leaves(), upstream)]
    for at in range(count):
        samples.append(torchs(_perturbed(case, rounding.floor, at), upstream))
    wide = _run(case.wide(), torch_chain, upstream.double())
    for result in (*samples, wide):
        if result.error is not None:
            return _failure(config.seed, result.error, "torch's backward raised, ours did not")
    typical = typical_errors(case.wide(), upstream.double(), rounding)
    return _judge_gradients(outcome, ours, samples, wide, typical)


def _upstream(case: Case, out: Tensor, unsure: Tensor, exact: bool) -> Tensor | None:
    """The gradient that enters backward; None where nothing is differentiated."""
    if not case.config.backward:
        return None
    generator = torch.Generator(out.device).manual_seed(64 * case.config.seed + 63)
    value = torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
    if exact:
        return value.mul_(2).round_()
    if case.statistics is not None and case.statistics.training:
        dims = case.config.pixel_dims
        # Of the channel, as each of its elements moves all.
        unsure = as_rows(unsure, dims).any(0).reshape(-1, *(1,) * dims)
    return torch.where(unsure, torch.zeros_like(value), value)


def _perturbed(case: Case, floor: float, number: int) -> Case:
    def change(tensor: Tensor) -> Tensor:
        generator = torch.Generator(tensor.device).manual_seed(number)
        noise = torch.rand(tensor.shape, generator=generator, device=tensor.device) * 2 - 1
        return (tensor.double() * (1 + floor * noise)).to(tensor.dtype)

    return case.converted(change)


def _judge_values(
    config: Config,
    ours: _Result,
    theirs: _Result,
    walk: Any,
    running: dict[str, tuple[Tensor, Tensor]],
    exact: bool,
) -> Outcome:
    bare = config.tail is None and not config.program
    options = {"exact": exact, "definite": operator_of(config).torch_is_definite}
    options["strides"] = bare and config.pixel_dims > 0 and ours.out.is_cuda
    found = [("output", judge.judge_value(ours.out, theirs.out, walk, **options))]
    for name, tensor in ours.running.items():
        other = theirs.running[name]
        if name in running:
            clear = as_rows(~walk.ambiguous, config.pixel_dims).all(0)
            found.append((name, judge.judge_running(tensor, other, *running[name], clear)))
        elif not torch.equal(tensor, other):
            found.append((name, judge.Judgement(f"is {_brief(tensor)}, torch's {_brief(other)}")))
    ratio = max(item.ratio for _, item in found)
    for name, item in found:
        if item.problem is not None:
            return Outcome(config.seed, "wrong", f"{name}: {item.problem}", ratio)
    return Outcome(config.seed, "correct", "", ratio)


def _brief(tensor: Tensor) -> str:
    return str(tensor.flatten()[:4].tolist())


def _judge_gradients(
    outcome: Outcome,
    ours: _Result,
    samples: list[_Result],
    wide: _Result,
    typical: dict[str, Tensor],
) -> Outcome:
    ratio = 0.0
    for name, exact in wide.gradients.items():
        others = [sample.gradients.get(name) for sample in samples]
        own = ours.gradients.get(name)
        found = judge.judge_gradient(own, others, exact, typical[name])
        ratio = max(ratio, found.ratio)
        if found.problem is not None:
            detail = f"gradient of {name}: {found.problem}"
            return Outcome(outcome.seed, "wrong", detail, outcome.ratio, ratio)
    return Outcome(outcome.seed, "correct", "", outcome.ratio, ratio)


def _check_rejection(case: Case, expected: type[Exception], first: _Result | None) -> Outcome:
    """An invalid call raises `expected`, says a value, changes no statistic, harms no device."""
    seed = case.config.seed
    what = case.config.mistake or "as drawn"
    own = case.leaves()
    before = (
        {name: t.clone() for name, t in own.statistics.running().items()}
        if (own.statistics is not None)
        else {}
    )
    ours, problem = _ours(own, None)
    if problem is not None:
        return Outcome(seed, "wrong", f"{what}: {problem}")
    if ours.error is None:
        empty = isinstance(ours.out, Tensor) and ours.out.numel() == 0
        if empty and _torch_is_lenient(case, expected):
            return Outcome(seed, "correct")
        return Outcome(seed, "wrong", f"{what}: raised nothing instead of {expected.__name__}")
    if _is_device_error(ours.error):
        return _failure(seed, ours.error, what)
    shown = f"{type(ours.error).__name__}: {str(ours.error).strip()[:300]}"
    if type(ours.error) is not expected:
        return Outcome(seed, "unclean", f"{what}: {shown}; expected {expected.__name__}")
    theirs = first.error if first is not None else None
    if not names_a_value(str(ours.error)) and str(ours.error) != str(theirs):
        return Outcome(seed, "unclean", f"{what}: names no value: {shown}")
    for name, tensor in before.items():
        allowed = [tensor] if first is None else [tensor, first.running[name]]  # torch may count
        if not any(torch.equal(ours.running[name], state) for state in allowed):
            return Outcome(seed, "unclean", f"{what}: raised {shown} but changed {name}")
    return Outcome(seed, "rejected", shown)


def _torch_is_lenient(case: Case, expected: type[Exception]) -> bool:
    """Whether torch stumbles over an empty tensor of its own, or answers where it has no data."""
    return expected is IndexError or _run(case.leaves(), torch_chain, None).error is None


def names_a_value(message: str) -> bool:
    """Whether an error says what it met (a number, a quotation, a type), or the remedy."""
    return bool(re.search(r"\d|'|; |float|int|bool|complex|list|None|NaN|Long|Float", message))
