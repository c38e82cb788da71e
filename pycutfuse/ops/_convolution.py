"""Convolutions at a tier where torch's chain or a backward needs one, and their gradients."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pycutfuse import config, reference
from pycutfuse.geometry import Geometry, Pair
from pycutfuse.ops import _conv_launch
from pycutfuse.ops._conv_call import Call, is_strict
from pycutfuse.program import EMPTY

_aten: Any = torch.ops.aten


def _ieee(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, output_padding: Pair
) -> Tensor:
    """torch's symmetric convolution without TF32: below its flags there is an argument for it."""
    if geometry.transposed and any(
        more >= by for more, by in zip(output_padding, geometry.stride, strict=True)
    ):
        # cuDNN does not take it, and what does reads the flags of matrix products.
        wide = [None if one is None else one.double() for one in (x, weight, bias)]
        return _ieee_of(wide, geometry, output_padding).float()
    return _ieee_of([x, weight, bias], geometry, output_padding)


def _ieee_of(tensors: list[Tensor | None], geometry: Geometry, output_padding: Pair) -> Tensor:
    backend = torch.backends.cudnn
    deterministic = backend.deterministic or torch.are_deterministic_algorithms_enabled()
    made: Tensor = _aten._convolution(
        *tensors,
        geometry.stride,
        geometry.padding[:2],
        geometry.dilation,
        geometry.transposed,
        output_padding,
        geometry.groups,
        backend.benchmark,
        deterministic,
        backend.enabled,
        False,  # allow_tf32
    )
    return made


def _evened(x: Tensor, geometry: Geometry) -> tuple[Tensor, Geometry]:
    """`x` padded below and right so that the rest of the padding is symmetric, as torch pads."""
    above, left, below, right = geometry.padding
    if geometry.symmetric:
        return x, geometry
    padded = F.pad(x, (0, right - left, 0, below - above))
    return padded, geometry._replace(padding=(above, left, above, left))


def torch_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, precision: str
) -> Tensor:
    """torch's convolution of (N, C, H, W), never less accurate than `precision` asks for."""
    if is_strict(x, precision):
        x, geometry = _evened(x, geometry)
        return _ieee(x, weight, bias, geometry, geometry.output_padding)
    return reference.convolution(x, weight, bias, geometry, (), (), ())


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, precision: str
) -> Tensor:
    """The convolution of (N, C, H, W) by our kernel where it runs, else by torch; silent."""
    tier = config.resolve_conv_tier(precision)
    if x.is_cuda and tier != "torch":
        call = Call(x, weight, bias, None, geometry, EMPTY, (), precision)
        found = _conv_launch.lookup(call, tier)
        if isinstance(found, _conv_launch.ConvRecipe):
            return _conv_launch.launch(found, call)
    return torch_convolution(x, weight, bias, geometry, precision)


def convolve_again(call: Call) -> Tensor:
    """The convolution of a whole call, with its bias, as its forward had it.

    By the same policy of our kernels or, where torch ran, by torch: a batch norm's saved mean and
    1 / std are those of these values, and where a channel is constant a rounding counts.
    """
    tier = config.resolve_conv_tier(call.precision)
    if call.x.is_cuda and tier != "torch":
        found = _conv_launch.lookup_bare(call, tier)
        if isinstance(found, _conv_launch.ConvRecipe):
            return _conv_launch.launch(found, _conv_launch.bare(call))
    return torch_convolution(*call[:3], call.geometry, call.precision)


def _rest(size: int, made: int, kernel: int, geometry: Geometry, at: int) -> int:
    """Pixels of a convolution's input beyond those that its gradient's formula makes."""
    reach = geometry.dilation[at] * (kernel - 1) + 1
    return size - ((made - 1) * geometry.stride[at] - 2 * geometry.padding[at] + reach)


def _ieee_vjp(
    grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As `convolution_vjp` of a symmetric geometry, without TF32 under flags that allow it.

    The gradient of x is itself a convolution. That of weight torch computes by its flags alone, so
    it goes through float64.
    """
    of_x = of_weight = of_bias = None
    if needs[0]:
        sizes = list(zip(x.shape[2:], grad.shape[2:], weight.shape[2:], strict=True))
        extra = (0, 0)
        if not geometry.transposed:
            above, left = (_rest(*one, geometry, at) for at, one in enumerate(sizes))
            extra = above, left
        turned = geometry._replace(transposed=not geometry.transposed)
        of_x = _ieee(grad, weight, None, turned, extra)
        of_x = of_x[:, :, : x.shape[2], : x.shape[3]]
    if needs[1]:
        wide = (grad.double(), x.double(), weight.double())
        of_weight = _backward(*wide, geometry, (False, True, False))[1]
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
    if needs[2]:
        of_bias = grad.sum((0, 2, 3))
    return of_x, of_weight, of_bias


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    stride, padding, dilation, output_padding, groups, transposed = geometry
    sizes = [grad.shape[1]] if needs[2] else None
    given = (stride, padding[:2], dilation, transposed, output_padding, groups)
    found: tuple[Tensor | None, Tensor | None, Tensor | None]
    found = _aten.convolution_backward(grad, x, weight, sizes, *given, needs)
    return found


def convolution_vjp(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    geometry: Geometry,
    needs: tuple[bool, bool, bool],
    precision: str,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x (N, C, H, W), weight and bias, None where `needs` does not want it."""
    height, width = x.shape[2:]
    x, geometry = _evened(x, geometry)
    backward = _ieee_vjp if is_strict(x, precision) else _backward
    of_x, *rest = backward(grad, x, weight, geometry, needs)
    of_weight, of_bias = (one if need else None for one, need in zip(rest, needs[1:], strict=True))
    if not needs[0] or of_x is None:
        return None, of_weight, of_bias
    return of_x[:, :, :height, :width], of_weight, of_bias
