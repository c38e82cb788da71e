"""Is a result wrong? The rules, without any tensor being made here.

Values (`judge_value`)
    Kinds (finite, NaN, inf, -inf) equal PyTorch's own, except where the float64 value is within an
    error of the dtype's range. cuDNN may compute a convolution from transformed images, which
    spread a non-finite value: those of the float64 value are right, too. Whole numbers that float32
    holds are exact. Else both errors of `pycutfuse.testing.errors`, here with scales carried
    through the chain (`envelope`), are at most ``MARGIN`` times max(PyTorch's in the same run,
    floor). The Frobenius one counts where at least ``ENOUGH`` elements carry it: fewer are a matter
    of luck.

    Why no false alarms: a correct result of the promised accuracy lies inside the envelope by
    construction, whatever the steps amplify. Why real bugs are seen: the envelope of a contraction
    is 2^-22 of |A|·|B|, and a product left out, a tile of other data, one plane of the split or a
    wrong step exceeds that by orders of magnitude.

Gradients (`judge_gradient`)
    Error against float64 autograd, in the Frobenius and the largest norm, at most ``GRADIENT``
    times the largest of PyTorch's over several runs whose inputs differ by an error of the tier:
    they sample what rounding does to this very gradient. Or at most as many times what rounding of
    the terms does to the sum (`gradients`): where that cancels, to 0 for a batch of equal rows, no
    changed input shows it. No gradient enters elements that pass a kink (relu at 0) within their
    error.

`Judgement.ratio` is the error over max(PyTorch's, floor) without margin: above 1 the promise is
broken, though not by enough to call the result wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pycutfuse.testing.accuracy import ErrorPair, errors, kinds, no_worse
from pycutfuse.testing.repro.envelope import MARGIN, Envelope

ENOUGH = 256
GRADIENT = 8.0
_NAN = float("nan")


@dataclass(frozen=True)
class Judgement:
    """A problem in words, or None; and our error over the promised one."""

    problem: str | None = None
    ratio: float = 0.0


_KIND_WORDS = ("finite", "NaN", "inf", "-inf")


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def compare_form(ours: Tensor, theirs: Tensor, *, strides: bool = False) -> str | None:
    """Say how shape, dtype or device differ from torch's, or None; `strides` compares them too."""
    for name in ("shape", "dtype", "device"):
        own, other = getattr(ours, name), getattr(theirs, name)
        if own != other:
            shown = (tuple(own), tuple(other)) if name == "shape" else (own, other)
            return f"{name} is {shown[0]}, torch's is {shown[1]}"
    if strides and ours.numel():
        pairs = zip(ours.stride(), theirs.stride(), ours.shape, strict=True)
        if any(own != other and size > 1 for own, other, size in pairs):
            return f"strides are {ours.stride()}, torch's are {theirs.stride()}"
    return None


def _compare_kinds(
    ours: Tensor, theirs: Tensor, where: Tensor, definition: Tensor | None = None
) -> str | None:
    own, other = kinds(ours), kinds(theirs)
    differ = (own != other) & where
    if definition is not None:
        differ &= own != kinds(definition)
    if not bool(differ.any()):
        return None
    at = _first(differ)
    return (
        f"{int(differ.sum())} of {ours.numel()} elements are of another kind than torch's, the "
        f"first at {at}: {_KIND_WORDS[int(own[at])]}, torch's {_KIND_WORDS[int(other[at])]}"
    )


def _worst(ours: Tensor, exact: Tensor, scale: Tensor, valid: Tensor) -> str:
    off = torch.where(valid, (ours.double() - exact).abs() / scale, 0.0)
    at = _first(off == off.max())
    return f"; worst at {at}: {float(ours[at]):.9g}, exact {float(exact[at]):.9g}"


def judge_value(
    ours: Tensor,
    theirs: Tensor,
    walk: Envelope,
    *,
    exact: bool = False,
    definite: bool = True,
    strides: bool = False,
) -> Judgement:
    """Compare a result with torch's and with its envelope; `exact` wants equality.

    Without `definite` a kind may be that of the float64 value in place of torch's.
    """
    problem = compare_form(ours, theirs, strides=strides)
    if problem is not None:
        return Judgement(problem)
    if ours.numel() == 0:
        return Judgement()
    clear = ~walk.ambiguous
    problem = _compare_kinds(ours, theirs, clear, None if definite else walk.value)
    if problem is not None:
        return Judgement(problem)
    if exact:
        wrong = ours.double() != walk.value
        if bool(wrong.any()):
            worst = _worst(ours, walk.value, torch.ones_like(walk.value), clear)
            return Judgement(f"{int(wrong.sum())} whole numbers are not exact{worst}")
        return Judgement()
    scale = walk.scale
    valid = clear & ours.isfinite() & theirs.isfinite() & walk.value.isfinite()
    valid &= scale.isfinite() & (scale > 0)
    if not bool(valid.any()):
        return Judgement()
    floor = walk.rounding.floor
    chosen = walk.value[valid], scale[valid]
    own, other = errors(ours[valid], *chosen), errors(theirs[valid], *chosen)
    ratio = own.scaled / max(other.scaled, floor)
    problem = _exceeds(ErrorPair(_NAN, own.scaled), ErrorPair(_NAN, other.scaled), floor)
    typical = walk.typical[valid] / floor
    if problem is None and _carriers(typical) >= ENOUGH and bool(typical.isfinite().all()):
        norm = float(walk.value[valid].norm()) or 1.0
        limit = floor * max(1.0, float(typical.norm()) / norm)
        ratio = max(ratio, own.frobenius / max(other.frobenius, limit))
        problem = _exceeds(ErrorPair(own.frobenius, _NAN), ErrorPair(other.frobenius, _NAN), limit)
    if problem is not None:
        problem += _worst(ours, walk.value, scale, valid)
    return Judgement(problem, ratio)


def _exceeds(own: ErrorPair, other: ErrorPair, floor: float) -> str | None:
    relaxed = ErrorPair(MARGIN * other.frobenius, MARGIN * other.scaled)
    return no_worse(own, relaxed, MARGIN * floor)


def _carriers(size: Tensor) -> float:
    """How many elements carry a norm: their number if they are equal, 1 if one outweighs all."""
    part = size / size.max()
    return float(part.square().sum().square() / part.square().square().sum())


def judge_running(
    ours: Tensor, theirs: Tensor, exact: Tensor, bound: Tensor, where: Tensor
) -> Judgement:
    """A running statistic against its float64 value and error bound, at the channels of `where`."""
    problem = compare_form(ours, theirs) or _compare_kinds(ours, theirs, where)
    if problem is not None:
        return Judgement(problem)
    valid = where & ours.isfinite() & exact.isfinite() & bound.isfinite() & (bound > 0)
    own, other = (((t.double() - exact).abs() / bound)[valid] for t in (ours, theirs))
    if own.numel() == 0:
        return Judgement()
    ratio = float(own.max()) / max(float(other.max()), 1.0)
    if ratio <= MARGIN:
        return Judgement(None, ratio)
    worst = _worst(ours, exact, bound, valid)
    return Judgement(f"error is {ratio:.3g} times what rounding explains{worst}", ratio)


def judge_gradient(
    ours: Tensor | None, samples: Sequence[Tensor | None], exact: Tensor | None, typical: Tensor
) -> Judgement:
    """A gradient against float64 autograd's and torch's of several runs, the first unperturbed.

    `typical` is the error that rounding of its terms explains.
    """
    theirs = samples[0]
    if theirs is None or exact is None or ours is None:
        one_only = (theirs is None) != (ours is None)
        return Judgement("only one of ours and torch's exists" if one_only else None)
    problem = compare_form(ours, theirs)
    if problem is not None or ours.numel() == 0:
        return Judgement(problem)
    valid = exact.isfinite()
    for sample in samples:
        if sample is not None:
            valid = valid & sample.isfinite()
    if bool((valid & ~ours.isfinite()).any()):
        at = _first(valid & ~ours.isfinite())
        return Judgement(f"{float(ours[at])} at {at} where torch's is {float(theirs[at]):.9g}")
    if not bool(valid.any()):
        return Judgement()
    value = exact[valid]
    own = ours[valid].double() - value
    others = [s[valid].double() - value for s in samples if s is not None]
    others.append(typical[valid])
    tiny = torch.finfo(ours.dtype).smallest_normal
    ratio, problem = 0.0, None
    for name, measure in (("frobenius", torch.linalg.vector_norm), ("largest", _largest)):
        allowed = max(*(float(measure(o)) for o in others), tiny)
        found = float(measure(own))
        ratio = max(ratio, found / allowed)
        if not found <= GRADIENT * allowed:
            problem = f"{name} error {found:.3e} exceeds {GRADIENT:g} times the {allowed:.3e} of "
            problem += "torch or of rounding"
            problem += _worst(ours, exact, torch.ones_like(exact), valid)
            break
    return Judgement(problem, ratio)


def _largest(value: Tensor) -> Tensor:
    return value.abs().max()
