"""Error against float64: the two metrics, and the rule that decides whether a result passes.

A result passes if, in each metric, its error is at most the larger of PyTorch's error in the same
run and a limit (for fp32 2^-22, or 2^-10 where TF32 is allowed):

* ``frobenius``: |y - r| / |r| in the Frobenius norm, r the float64 result;
* ``componentwise``: max over elements of |y - r| / s. For a contraction alone s is |A|·|B|, the
  product of the absolute values. `reference_with_scale` carries it through whatever follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad as _forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pycutfuse.testing import kinds

forward_ad: Any = _forward_ad  # untyped in torch

_CHANNEL_DIM: dict[Any, int] = {
    F.linear: -1,
    torch.matmul: -1,
    torch.mm: -1,
    torch.bmm: -1,
    torch.Tensor.matmul: -1,
    torch.Tensor.mm: -1,
    torch.Tensor.bmm: -1,
    F.conv1d: 1,
    F.conv2d: 1,
    F.conv3d: 1,
    F.conv_transpose1d: 1,
    F.conv_transpose2d: 1,
    F.conv_transpose3d: 1,
}


def limit_for(dtype: torch.dtype) -> float:
    """Error that always passes: 2^-22 for float32, the unit roundoff of any other dtype.

    float32's for integers and truth values, which have an error of 0 or are wrong.
    """
    rounds = dtype != torch.float32 and (dtype.is_floating_point or dtype.is_complex)
    return torch.finfo(dtype).eps / 2 if rounds else 2.0**-22


@dataclass(frozen=True)
class Errors:
    """Both metrics of one result."""

    frobenius: float
    componentwise: float


@dataclass(frozen=True)
class Check:
    """One compared tensor: our errors, PyTorch's in the same run, and the limit."""

    what: str
    ours: Errors
    torch: Errors
    limit: float

    @property
    def ratio(self) -> float:
        """Our error over the allowed one, the larger of both metrics; at most 1 passes."""
        return max(
            _ratio(self.ours.frobenius, max(self.torch.frobenius, self.limit)),
            _ratio(self.ours.componentwise, max(self.torch.componentwise, self.limit)),
        )

    @property
    def passed(self) -> bool:
        """True if neither metric exceeds what is allowed."""
        return self.ratio <= 1.0


def failure(what: str) -> Check:
    """A check that nothing was measured for, since it failed before."""
    return Check(what, Errors(math.inf, math.inf), Errors(0.0, 0.0), 2.0**-22)


def _ratio(error: float, allowed: float) -> float:
    if math.isnan(error):
        return math.inf
    return error / allowed if math.isfinite(allowed) else (0.0 if math.isfinite(error) else 1.0)


class _CarryRounding(TorchFunctionMode):
    """Adds a tangent of ±|A|·|B| to the result of every contraction, with random signs.

    Forward-mode differentiation then carries that unit of rounding to the model's output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator: torch.Generator | None = None
        self.magnitude: Tensor | None = None
        self.channel_dim = -1

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func not in _CHANNEL_DIM:
            return out
        primal, tangent = forward_ad.unpack_dual(out)
        magnitude = func(*map(_absolute, args), **{k: _absolute(v) for k, v in kwargs.items()})
        if self.generator is None:
            self.generator = torch.Generator(primal.device)  # a fixed seed, not the global state
        signs = torch.empty_like(magnitude).random_(0, 2, generator=self.generator)
        unit = signs.mul_(2).sub_(1).mul_(magnitude)
        self.magnitude, self.channel_dim = magnitude, _CHANNEL_DIM[func]
        return forward_ad.make_dual(primal, unit if tangent is None else unit + tangent)


def _absolute(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    primal = forward_ad.unpack_dual(value).primal
    return primal.abs() if primal.is_floating_point() else primal


def reference_with_scale(call: Callable[[], Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Run a float64 model once; return its outputs and what one relative rounding is worth there.

    Parameters
    ----------
    call : callable
        Runs the float64 model and returns a tensor, or a list or tuple of tensors.

    Returns
    -------
    outputs, scales : list of Tensor
        For a single contraction the scale is |A|·|B| elementwise. After pointwise steps or batch
        normalisation it is that times the largest derivative met in the channel, and where the
        shape has changed since (logsumexp) it is the size of the carried rounding. It is never
        less than |output|.
    """
    with torch.no_grad(), forward_ad.dual_level():
        with _CarryRounding() as mode:
            result = call()
        outputs, scales = [], []
        for item in tensors(result):
            primal, tangent = forward_ad.unpack_dual(item)
            outputs.append(primal)
            scales.append(_scale(primal, tangent, mode))
    return outputs, scales


def tensors(result: Any) -> list[Tensor]:
    """The tensors of a forward's result: itself, or those in (nested) lists and tuples.

    Raises
    ------
    TypeError
        If anything else is among them.
    """
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return [tensor for item in result for tensor in tensors(item)]
    raise TypeError(f"forward returned {type(result).__name__}; only tensors can be compared")


def _scale(primal: Tensor, tangent: Tensor | None, mode: _CarryRounding) -> Tensor:
    if not (primal.is_floating_point() or primal.is_complex()):
        return torch.ones_like(primal, dtype=torch.float64)
    size = primal.abs()
    if tangent is None or mode.magnitude is None:
        # Nothing is known of how the result was computed: one scale for the whole tensor.
        return torch.maximum(size, size.square().mean().sqrt())
    carried = tangent.abs()
    if carried.shape == mode.magnitude.shape and carried.ndim > 0:
        channel = mode.channel_dim % carried.ndim
        others = [d for d in range(carried.ndim) if d != channel]
        slope = torch.where(mode.magnitude > 0, carried / mode.magnitude, 0.0)
        if others and slope.numel():
            slope = slope.amax(others, keepdim=True)
        carried = slope * mode.magnitude
    return torch.maximum(size, carried)


def errors(result: Tensor, reference: Tensor, scale: Tensor, where: Tensor) -> Errors:
    """Both metrics of `result` against the float64 `reference`, over the elements in `where`."""
    difference = torch.where(where, result.double() - reference, 0.0)
    finite_reference = torch.where(where, reference, 0.0)
    norm = float(torch.linalg.vector_norm(finite_reference))
    distance = float(torch.linalg.vector_norm(difference))
    difference.abs_()
    relative = torch.where(difference == 0, 0.0, difference / scale)
    return Errors(
        frobenius=0.0 if distance == 0 else (distance / norm if norm else math.inf),
        componentwise=float(relative.max()) if relative.numel() else 0.0,
    )


def compare(
    what: str,
    ours: Tensor,
    theirs: Tensor,
    reference: Tensor,
    scale: Tensor | None = None,
    limit: float | None = None,
) -> Check:
    """Judge our result beside PyTorch's, both against float64.

    Parameters
    ----------
    what : str
        Named in reports.
    ours, theirs : Tensor
        Results in the user's dtype; `theirs` is PyTorch's own.
    reference : Tensor
        float64, same shape. Not read for integers and truth values, which must be equal.
    scale : Tensor, optional
        From `reference_with_scale`; by default max(|reference|, its root mean square).
    limit : float, optional
        Error that always passes in float32; by default 2^-22. Other dtypes have their own.

    Notes
    -----
    Where PyTorch's result is NaN, or an infinity, ours must be the same, and the other way round;
    errors are taken over the remaining elements. A mismatch is an infinite error.
    """
    if limit is None or theirs.dtype != torch.float32:
        limit = limit_for(theirs.dtype)
    failed = Errors(math.inf, math.inf)
    own, other = _describe(ours), _describe(theirs)
    if own != other:
        return Check(f"{what} ({own}, PyTorch's is {other})", failed, Errors(0.0, 0.0), limit)
    if theirs.is_complex():
        ours, theirs, reference = map(torch.view_as_real, (ours, theirs, reference))
        scale = None
    elif not theirs.is_floating_point():
        same = torch.equal(ours, theirs)
        return Check(what, Errors(0.0, 0.0) if same else failed, Errors(0.0, 0.0), limit)
    if scale is None:
        size = reference.abs()
        scale = torch.maximum(size, size.square().mean().sqrt()) if size.numel() else size
    their_kinds = kinds(theirs)
    finite = their_kinds == 0
    their_errors = errors(theirs, reference, scale, finite)
    count = int((kinds(ours) != their_kinds).sum())
    if count:
        what = f"{what} (not NaN or infinite alike: {count} of {ours.numel()} elements)"
        return Check(what, failed, their_errors, limit)
    return Check(what, errors(ours, reference, scale, finite), their_errors, limit)


def _describe(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = "" if tensor.layout == torch.strided else f" {tensor.layout}"
    return f"{tuple(tensor.shape)} {dtype}{layout} on {tensor.device}"
