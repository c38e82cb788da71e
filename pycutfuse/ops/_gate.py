"""Which calls may reach a raw operator at all, and what an invalid call raises."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _mode_stack

from pycutfuse.program import OPS, Encoded

_PLAIN = frozenset({Tensor, Parameter})
_TRACED = frozenset({"FakeTensor", "FunctionalTensor"})
_F32 = torch.float32
_DTYPES = (_F32, torch.float16, torch.bfloat16)
_ON_CPU = (_F32,)  # the others are left to torch's own autograd
_SOFTPLUS = OPS["softplus"]
_STRIDED = torch.strided
_COUNTER = "_FlopCounterMode"  # the mode within torch.utils.flop_counter.FlopCounterMode
is_compiling = torch.compiler.is_compiling
_autocast_enabled = torch.is_autocast_enabled
_transforms_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state

# What `is_plain_eager` asks besides whether torch compiles, and the level of forward derivatives.
STATE: tuple[Callable[[], Any], ...] = (
    _autocast_enabled,
    _transforms_active,
    _dispatch_modes,
    _tracing_state,
)


def _named(dtype: torch.dtype) -> str:
    return f"dtype {dtype}".replace("torch.", "")


def why_operands(dtype: torch.dtype, operands: Sequence[Tensor]) -> str | None:
    """Say why no kernel of `dtype` reads a program's operands, or None.

    As torch promotes, a result stays at float16 or bfloat16 only with operands of that dtype or of
    0 dimensions.
    """
    for operand in operands:
        if operand.dtype is dtype:
            continue
        if operand.dtype not in _DTYPES:
            return _named(operand.dtype)
        if dtype is not _F32 and operand.dim() > 0:
            return f"an operand of {_named(operand.dtype)}, to which torch promotes the result"
    return None


def why_statistics(dtype: torch.dtype, statistics: Sequence[Tensor | None]) -> str | None:
    """Say why no kernel of `dtype` reads a batch norm's tensors, or None.

    `statistics` holds bn_weight, bn_bias, running_mean, running_var and num_batches_tracked: each
    pair of `dtype` or of float32, as torch.
    """
    for pair in (statistics[0:2], statistics[2:4]):
        seen = None
        for tensor in pair:
            if tensor is None:
                continue
            if tensor.dtype not in (dtype, _F32) or seen not in (None, tensor.dtype):
                return f"a batch norm's tensor of {_named(tensor.dtype)}"
            seen = tensor.dtype
    count = statistics[4] if len(statistics) > 4 else None
    if count is not None and count.dtype is not torch.int64:
        return f"num_batches_tracked of {_named(count.dtype)}"
    return None


def why_state(tensors: Sequence[Tensor | None]) -> str | None:
    """Say which state of this thread needs the plain chain of a call on `tensors`, or None."""
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    traced = _tracing_state() is not None
    if (traced or is_compiling()) and torch.onnx.is_in_onnx_export():
        return "torch.onnx.export, which knows torch's operators"
    if is_compiling():
        return None
    if _transforms_active():
        return "a torch.func transform is active"
    # A traced graph cannot hold an autograd.Function. Without gradients it is traced once more, to
    # compare.
    if traced and any(one is not None and one.requires_grad for one in tensors):
        return "torch.jit.trace of what requires gradients"
    if _dispatch_modes() and any(type(mode).__name__ == _COUNTER for mode in _mode_stack()):
        return "a FlopCounterMode, which counts torch's operators"
    return None


def check_tensor(x: object, name: str = "x") -> None:
    """Raise TypeError unless `x`, an argument of that name, is a Tensor."""
    if isinstance(x, Tensor):
        return
    if isinstance(x, torch.fx.Proxy):
        raise TypeError(
            f"{name} is a Proxy of torch.fx, which cannot trace a fused call; use a "
            "torch.fx.Tracer whose is_leaf_module is true of pycutfuse modules, or torch.export"
        )
    raise TypeError(f"{name} is a {type(x).__name__}; it must be a Tensor")


def mixed_devices(x: Tensor, other: Tensor) -> str:
    """Say that a call's tensors are not on one device."""
    return (
        f"expected all tensors to be on the same device: x is on {x.device} but a tensor "
        f"of shape {_shape(other)} is on {other.device}; move one with .to(device)"
    )


def why_reference(
    x: Tensor,
    weight: Tensor,
    operands: Sequence[Tensor],
    statistics: Sequence[Tensor | None] = (),
    weight_dims: int = 2,
) -> str | None:
    """Say why the plain chain must run, with torch's own autograd, or None.

    Only what the raw operators cannot see or answer is decided here; what depends on the device
    and the problem is decided inside them. The reasons do not name sizes: they are counted.

    Raises
    ------
    TypeError
        If an argument is no tensor.
    RuntimeError
        If some are on the meta device and others not, as torch.
    """
    check_tensor(weight, "weight")
    for tensor in (x, weight, *operands, *statistics):
        if tensor is None:
            continue
        if isinstance(tensor, Tensor) and tensor.is_meta != x.is_meta and tensor.dim() > 0:
            raise RuntimeError(mixed_devices(x, tensor))  # the fake kernel would answer
        kind = type(tensor)
        if kind not in _PLAIN and kind.__name__ not in _TRACED:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"argument is a {kind.__name__}; it must be a Tensor")
            return f"tensor subclass {kind.__name__}"
        if tensor.is_nested:
            return "a nested tensor"
        if tensor.layout is not _STRIDED:
            return f"layout {tensor.layout}".replace("torch.", "")
    for tensor in (x, weight):
        dtype = tensor.dtype
        if dtype not in (_ON_CPU if x.is_cpu else _DTYPES) or dtype is not x.dtype:
            return _named(dtype)
    reason = why_operands(x.dtype, operands) or why_statistics(x.dtype, statistics)
    if reason is not None:
        return reason
    if weight.dim() != weight_dims:
        return f"a weight of {weight.dim()} dimensions"
    if x.is_cpu:
        if torch.is_autocast_enabled("cpu"):
            return "autocast is enabled"
    elif not x.is_cuda and not x.is_meta:
        return f"{x.device.type} tensors"
    return why_state((x, weight, *operands, *statistics))


def _to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype)


def autocasts(x: Tensor) -> bool:
    """Whether autocast changes dtypes of a call on `x`."""
    return x.is_cuda and torch.is_autocast_enabled("cuda")


def asks_ieee(x: Tensor, precision: str) -> bool:
    """Whether a call of `precision` on `x` has more to ask for than torch's flags may allow."""
    asked = precision == "ieee" and x.is_cuda and x.dtype is _F32
    return asked and not autocasts(x)  # which casts it


def why_not_autocast(*programs: Encoded) -> str | None:
    """Say why autocast's result needs the plain chain, or None if only linear's inputs are cast."""
    for program in programs:
        if _SOFTPLUS in program.codes[::2]:
            return "autocast runs softplus in float32"
    return None


def autocast(
    x: Tensor,
    weight: Tensor,
    program: Encoded,
    operands: Sequence[Tensor],
    convert: Callable[[Tensor, torch.dtype], Tensor] = _to,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """x, weight and operands as autocast gives them to linear: x, weight and its bias are cast."""
    dtype, device = torch.get_autocast_dtype("cuda"), x.device

    def cast(tensor: Tensor) -> Tensor:
        eligible = tensor.device == device and tensor.dtype in _DTYPES
        return convert(tensor, dtype) if eligible and tensor.dtype is not dtype else tensor

    bias = [cast(operand) for operand in operands[: int(program.biased)]]
    return cast(x), cast(weight), [*bias, *operands[len(bias) :]]


def is_plain_eager() -> bool:
    """Whether nothing is active that must see the call: then the dispatcher may be skipped."""
    return not (
        is_compiling()
        or _autocast_enabled()  # of CUDA; naming it costs as much again
        or forward_ad._current_level >= 0
        or _transforms_active()
        or _dispatch_modes()
        or _tracing_state() is not None
    )


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for calls that `is_plain_eager` accepts.

    torch's own first looks again for transforms and takes off the wrappers that ended ones left.
    """
    layer: Any = super(torch.autograd.Function, function)
    apply: Callable[..., Any] = layer.apply
    return apply


def is_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Whether all of them are plain tensors or parameters, no subclasses."""
    return all(tensor is None or type(tensor) in _PLAIN for tensor in tensors)


def any_requires_grad(x: Tensor, weight: Tensor, others: Sequence[Tensor | None]) -> bool:
    """Whether autograd must record a call, where gradients are enabled."""
    if x.requires_grad or weight.requires_grad:
        return True
    for tensor in others:  # noqa: SIM110 - a generator costs three times as much
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def check_linear(x: Tensor, weight: Tensor) -> None:
    """Raise RuntimeError, as torch.nn.functional.linear, unless x and weight fit."""
    if x.dim() == 0:
        raise RuntimeError("linear: x has 0 dimensions; it needs at least 1, x.reshape(1, -1)?")
    if weight.dim() not in (1, 2):
        raise RuntimeError(
            f"linear: weight has {weight.dim()} dimensions; it needs 2, (out_features, in_features)"
        )
    if x.shape[-1] != weight.shape[-1]:
        raise RuntimeError(
            f"linear: x has {x.shape[-1]} features (shape {_shape(x)}) but weight has "
            f"{weight.shape[-1]} (shape {_shape(weight)}); the last dimensions must be equal"
        )


def check_dtypes(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, operator: str = "linear"
) -> None:
    """Raise RuntimeError, as torch.nn.functional.linear, for mixed dtypes outside autocast.

    TypeError without a weight.
    """
    check_tensor(weight, "weight")
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is None or tensor.dtype == weight.dtype:
            continue
        if not torch.is_autocast_enabled(weight.device.type):
            raise RuntimeError(
                f"{operator}: {name} is {tensor.dtype} but weight is {weight.dtype}; "
                "convert one of them with .to(dtype)"
            )


def check_bias(weight: Tensor, program: Encoded, operands: Sequence[Tensor]) -> None:
    """`check_dtypes` of a bias that is linear's own; another operand's dtype promotes."""
    if program.biased:
        check_dtypes(weight, weight, operands[0])


def check_operands(out_shape: Sequence[int], operands: Sequence[Tensor], where: str) -> None:
    """Raise RuntimeError unless every operand broadcasts to `out_shape` without growing it."""
    for at, operand in enumerate(operands):
        extra = operand.dim() - len(out_shape)
        fits = extra <= 0
        for size, limit in zip(reversed(operand.shape), reversed(out_shape), strict=False):
            fits = fits and (size == limit or size == 1)
        if not fits:
            raise RuntimeError(
                f"{where}: operand {at} has shape {_shape(operand)}, which does not broadcast to "
                f"the output's {tuple(out_shape)}; each of its dimensions must be equal or 1"
            )


def check_one_sample(m: int, n: int, training: bool) -> None:
    """Raise ValueError, as torch, for statistics of one sample."""
    if training and m == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size [{m}, {n}]; "
            "statistics need at least 2 samples: give a larger batch or call .eval()"
        )


def check_batch_norm(
    x: Tensor, weight: Tensor, statistics: Sequence[Tensor | None], training: bool
) -> None:
    """Raise, as nn.BatchNorm1d's forward, unless the call is valid. Changes nothing.

    `statistics` holds bn_weight, bn_bias, running_mean and running_var.
    """
    if x.dim() != 2:
        raise ValueError(
            f"linear_batch_norm: expected 2D input (got {x.dim()}D input of shape {_shape(x)}); "
            "reshape x to (N, in_features)"
        )
    features = weight.shape[0]
    check_one_sample(x.shape[0], features, training)
    running_mean, running_var = statistics[2:]
    if not training and (running_mean is None or running_var is None):
        raise RuntimeError(
            "linear_batch_norm: running_mean and running_var must be defined in evaluation mode; "
            "give both or training=True"
        )
    names = ("bn_weight", "bn_bias", "running_mean", "running_var")
    for name, tensor in zip(names, statistics, strict=True):
        if tensor is not None and (tensor.dim() != 1 or tensor.shape[0] != features):
            raise RuntimeError(
                f"linear_batch_norm: {name} should contain {features} elements (rows of weight) "
                f"but has shape {_shape(tensor)}"
            )
