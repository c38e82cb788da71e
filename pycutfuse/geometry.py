"""How a convolution's kernel meets its input: canonical, checked, without tensors' contents."""

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

Pair = tuple[int, int]


class Geometry(NamedTuple):
    """Everything besides sizes that says what a convolution computes."""

    stride: Pair
    padding: tuple[int, int, int, int]  # zeros above, left, below and right
    dilation: Pair
    output_padding: Pair
    groups: int
    transposed: bool

    @property
    def symmetric(self) -> bool:
        """Whether as much is padded below as above and right as left, which torch takes."""
        return self.padding[:2] == self.padding[2:]


def _integer(value: Any) -> Any:
    """`value` as an int, or None if torch takes no such thing for one; a SymInt stays."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return index(value)
    except TypeError:  # a tensor of another kind
        return None


def pair(operator: str, name: str, value: int | Sequence[int]) -> Pair:
    """`value` for both dimensions, as plain ints.

    Raises
    ------
    TypeError
        If it is neither an int nor a sequence of ints; a bool is none.
    RuntimeError
        If it has not 1 or 2 values, as torch.
    """
    if not isinstance(value, (tuple, list)):
        found = _integer(value)
        if found is None:
            raise TypeError(
                f"{operator}: {name} is a {type(value).__name__}; it must be an int or two ints"
            )
        return found, found
    ints = [_integer(one) for one in value]
    for one, found in zip(value, ints, strict=True):
        if found is None:
            kind = type(one).__name__
            raise TypeError(f"{operator}: {name} holds a {kind}; it must hold ints")
    if len(ints) not in (1, 2):
        raise RuntimeError(
            f"{operator}: {name} has {len(ints)} values; give one, or two: (height, width)"
        )
    return ints[0], ints[-1]


def _groups(operator: str, value: int) -> int:
    found: int | None = _integer(value)
    if found is None:
        raise TypeError(f"{operator}: groups is a {type(value).__name__}; it must be an int")
    return found


def _same(operator: str, weight: Tensor, stride: Pair, dilation: Pair) -> tuple[int, int, int, int]:
    if stride != (1, 1):
        raise RuntimeError(
            f"{operator}: padding='same' needs stride 1 but stride is {stride}; give padding as "
            "numbers"
        )
    if weight.dim() != 4:
        return 0, 0, 0, 0  # `output_shape` raises
    totals = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
    above, left = (total // 2 for total in totals)
    return above, left, totals[0] - above, totals[1] - left


def conv2d_geometry(
    weight: Tensor,
    stride: int | Sequence[int],
    padding: str | int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
) -> Geometry:
    """Canonicalise the arguments of torch.nn.functional.conv2d.

    Raises
    ------
    TypeError, RuntimeError
        As torch, for arguments of a wrong type, length or range.
    """
    operator = "conv2d"
    strides, dilations = pair(operator, "stride", stride), pair(operator, "dilation", dilation)
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise RuntimeError(
                f"{operator}: padding is {padding!r}; it must be 'same', 'valid' or numbers"
            )
        zeros = (0, 0, 0, 0)
        paddings = _same(operator, weight, strides, dilations) if padding == "same" else zeros
    else:
        paddings = pair(operator, "padding", padding) * 2
    made = Geometry(strides, paddings, dilations, (0, 0), _groups(operator, groups), False)
    _check_range(operator, made)
    return made


def conv_transpose2d_geometry(
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    output_padding: int | Sequence[int],
    groups: int,
    dilation: int | Sequence[int],
) -> Geometry:
    """Canonicalise the arguments of torch.nn.functional.conv_transpose2d.

    Raises
    ------
    TypeError, RuntimeError
        As torch, for arguments of a wrong type, length or range.
    """
    operator = "conv_transpose2d"
    strides, dilations = pair(operator, "stride", stride), pair(operator, "dilation", dilation)
    paddings = pair(operator, "padding", padding) * 2
    extra = pair(operator, "output_padding", output_padding)
    made = Geometry(strides, paddings, dilations, extra, _groups(operator, groups), True)
    _check_range(operator, made)
    for more, step, gap in zip(extra, strides, dilations, strict=True):
        if more >= max(step, gap):
            raise RuntimeError(
                f"{operator}: output_padding is {more} but must be smaller than stride {step} or "
                f"dilation {gap}; use a larger stride, or pad the result"
            )
    return made


def _check_range(operator: str, geometry: Geometry) -> None:
    for name, values, least in (
        ("stride", geometry.stride, 1),
        ("padding", geometry.padding[:2], 0),
        ("dilation", geometry.dilation, 1),
        ("output_padding", geometry.output_padding, 0),
        ("groups", (geometry.groups,), 1),
    ):
        if min(values) < least:
            raise RuntimeError(f"{operator}: {name} is {min(values)}; it must be at least {least}")


def operator_of(geometry: Geometry) -> str:
    """torch's name of the function."""
    return "conv_transpose2d" if geometry.transposed else "conv2d"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _check_channels(
    operator: str, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> int:
    """Raise RuntimeError, as torch, unless the channels fit; else their number in the result."""
    groups, channels = geometry.groups, x.shape[-3]
    first, second = weight.shape[:2]
    if first < groups or first % groups != 0:
        raise RuntimeError(
            f"{operator}: weight has {first} channels in dimension 0 (shape {_shape(weight)}), "
            f"which groups={groups} does not divide; they must be a multiple of groups"
        )
    wanted = first if geometry.transposed else second * groups
    if channels != wanted:
        raise RuntimeError(
            f"{operator}: x has {channels} channels (shape {_shape(x)}) but weight of shape "
            f"{_shape(weight)} takes {wanted} (groups={groups}); they must be equal"
        )
    made: int = second * groups if geometry.transposed else first
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != made):
        raise RuntimeError(
            f"{operator}: bias has shape {_shape(bias)} but the output has {made} channels; "
            f"it must be of shape ({made},)"
        )
    return made


def output_shape(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> tuple[int, ...]:
    """Shape of the result, (N, K, P, Q) or (K, P, Q).

    Raises
    ------
    RuntimeError
        As torch, if shapes do not fit or the result would have no pixels, or where it is
        transposed fewer.
    """
    operator = operator_of(geometry)
    if x.dim() not in (3, 4):
        raise RuntimeError(
            f"{operator}: x has {x.dim()} dimensions; it needs 4, (N, C, H, W), or 3, (C, H, W)"
        )
    if weight.dim() != 4:
        order = "(C, K / groups, R, S)" if geometry.transposed else "(K, C / groups, R, S)"
        raise RuntimeError(f"{operator}: weight has {weight.dim()} dimensions; it needs 4, {order}")
    channels = _check_channels(operator, x, weight, bias, geometry)
    pixels = []
    for at in (0, 1):
        size, kernel = x.shape[-2 + at], weight.shape[-2 + at]
        stride, dilation = geometry.stride[at], geometry.dilation[at]
        padded = geometry.padding[at] + geometry.padding[2 + at]
        if geometry.transposed:
            wide = (size - 1) * stride + dilation * (kernel - 1) + 1
            made = wide - padded + geometry.output_padding[at]
        else:
            reach = dilation * (kernel - 1) + 1
            made = (size + padded - reach) // stride + 1
        least = 0 if geometry.transposed else 1
        if made < least:
            raise RuntimeError(
                f"{operator}: the output would be {made} pixels {('high', 'wide')[at]} for x of "
                f"{size} pixels, a kernel of {kernel}, padding {padded} in all, stride {stride} "
                f"and dilation {dilation}; it needs at least {least}: use a larger x or "
                "other padding"
            )
        pixels.append(made)
    return (*x.shape[:-3], channels, *pixels)


def _like_channels_last(tensor: Tensor) -> bool:
    """Whether torch takes the strides of a 3-D or 4-D tensor for channels_last's."""
    shape, strides = tensor.shape, tensor.stride()
    if len(shape) == 3:  # as unsqueeze(0) gives them
        shape, strides = (1, *shape), (shape[0] * strides[0], *strides)  # type: ignore[assignment]
    if strides[1] == 0:
        return False
    least = 0
    for at in (1, 3, 2, 0):
        if shape[at] == 0 or strides[at] < least:
            return False
        if at == 0 and least == strides[1]:
            return False  # (N, 1, 1, 1): either format, torch takes it for contiguous
        least = strides[at] * (shape[at] if shape[at] > 1 else 1)
    return True


def _is_output_padding_big(geometry: Geometry) -> bool:
    """Whether torch runs its own kernel on a GPU, as cuDNN pads a result by less than a stride."""
    pairs = zip(geometry.output_padding, geometry.stride, strict=True)
    return any(extra >= step for extra, step in pairs)


def memory_format(x: Tensor, weight: Tensor, geometry: Geometry) -> torch.memory_format:
    """Format of a convolution's result: torch's cudnn_conv_suggest_memory_format.

    What cuDNN does not take is contiguous on a GPU, but torch.backends.cudnn.enabled is not read:
    a setting of the moment would have to be seen by plans and compiled graphs.
    """
    if torch.float64 in (x.dtype, weight.dtype) or 0 in x.shape:
        return torch.contiguous_format
    if x.is_cuda and _is_output_padding_big(geometry):
        return torch.contiguous_format
    if _like_channels_last(x) or _like_channels_last(weight):
        return torch.channels_last
    return torch.contiguous_format
