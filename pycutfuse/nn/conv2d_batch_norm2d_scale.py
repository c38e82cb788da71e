"""Conv2d -> BatchNorm2d -> scale."""

from typing import Any

import torch
from torch import Tensor, nn

from pycutfuse import config
from pycutfuse.geometry import Geometry, conv2d_geometry, output_shape
from pycutfuse.nn._base import check_source, refuses_one_value
from pycutfuse.nn._conv_base import PackedModule, PaddingMode, pad_input, settings_of
from pycutfuse.nn._epilogue import Epilogue, has_global_hooks, has_hooks
from pycutfuse.ops import _children, _gate
from pycutfuse.ops._conv_batch_norm import run
from pycutfuse.ops._conv_call import BATCH_NORM, Call, Norm, check_one_value, is_strict
from pycutfuse.ops._linear_batch_norm import encode_momentum
from pycutfuse.program import EMPTY, Encoded, Program, check_program, encode, mul

Scale = float | Tensor


class Conv2dBatchNorm2dScale(PackedModule):
    """``program(bn(conv(x)) * scaling_factor)``: convolution, batch norm and scale as one.

    Parameters
    ----------
    in_channels, out_channels, kernel_size
        Of the convolution.
    scaling_factor : float or Tensor
        A number; or a tensor of 0 dimensions or of shape ``(out_channels, 1, 1)``, which stays out
        of the ``state_dict`` and moves with the module; or a Parameter, which is learned. A tensor
        of another shape runs as the plain chain.
    stride, padding, dilation, groups, bias, padding_mode
        Of the convolution, as torch.nn.Conv2d.
    eps, momentum
        Of the batch norm; ``momentum=None`` averages over all batches.
    device, dtype
        Of the parameters, as torch.
    epilogue : sequence of Step
        Steps after the scale, at most 15; a Parameter in step N becomes ``epilogue.N.weight``.
    precision : {"ieee", "tf32", "torch"}, optional
        Tier of this module; None follows `pycutfuse.precision` and torch's flags for convolutions.

    Attributes
    ----------
    conv : torch.nn.Conv2d
    bn : torch.nn.BatchNorm2d
        Its ``training``, ``momentum``, ``affine`` and running statistics are read at each call.
    scaling_factor : float, Tensor or Parameter
        Read at each call.

    Raises
    ------
    TypeError, ValueError
        As torch.nn.Conv2d; also for a malformed program or an unknown precision.

    Notes
    -----
    Parameters are drawn in the order conv, bn and have the keys of the chain. Input
    ``(N, C, H, W)``.

    Examples
    --------
    >>> import torch, pycutfuse as pcf
    >>> layer = pcf.nn.Conv2dBatchNorm2dScale(3, 4, 3, 2.0)
    >>> layer(torch.randn(2, 3, 8, 8)).shape
    torch.Size([2, 4, 6, 6])
    >>> [name for name, _ in layer.named_parameters()]
    ['conv.weight', 'conv.bias', 'bn.weight', 'bn.bias']
    """

    conv: nn.Conv2d
    bn: nn.BatchNorm2d
    scaling_factor: Scale

    _holders = ("conv",)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        scaling_factor: Scale,
        *,
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        epilogue: Program = (),
        precision: config.Precision | None = None,
    ) -> None:
        check_program(epilogue)
        check_program((mul(scaling_factor), *epilogue))
        super().__init__(precision)
        given = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
        self.conv = nn.Conv2d(*given, padding_mode, device, dtype)
        self.bn = nn.BatchNorm2d(out_channels, eps, momentum, device=device, dtype=dtype)
        self._adopt(scaling_factor, epilogue)

    def __setattr__(self, name: str, value: Any) -> None:
        """As torch; a factor may also change between a number, a tensor and a Parameter."""
        if name == "scaling_factor":
            persistent = _is_persistent(self)
            for holder in (self._parameters, self._buffers, self.__dict__):
                holder.pop(name, None)
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value, persistent)
                return
        super().__setattr__(name, value)

    def _adopt(self, scale: Scale, epilogue: Program) -> None:
        self.scaling_factor = scale
        self.epilogue = Epilogue(epilogue)
        self._bare = len(self.epilogue) == 0
        steps = [step.step() for step in self.epilogue]
        # What the factor's value does not change is encoded once.
        self._after_of = 1.0 if isinstance(scale, Tensor) else scale
        self._after_number = encode((mul(self._after_of), *steps))
        self._after_tensor = encode((mul(torch.empty(())), *steps))
        self._geometry_of = settings_of(self.conv, self.conv.weight)
        self._geometry = self._make_geometry()

    def _make_geometry(self) -> Geometry:
        conv = self.conv
        padding = conv.padding if conv.padding_mode == "zeros" else 0
        return conv2d_geometry(conv.weight, conv.stride, padding, conv.dilation, conv.groups)

    def frozen_weight(self) -> Tensor | None:
        """The weight that `freeze` packs."""
        return getattr(self.conv, "weight", None)

    def _present_scale(self) -> Scale:
        for found in (self._parameters, self._buffers):  # each costs a tenth of the attribute
            scale = found.get("scaling_factor")
            if scale is not None:
                return scale
        return self.scaling_factor

    def why_chain(self) -> str | None:
        """Say why the children must run one after the other, or None. Sizes are not named."""
        children: Any = self._modules
        conv, bn = children["conv"], children["bn"]
        if type(conv) is not nn.Conv2d or type(bn) is not nn.BatchNorm2d:
            return _children.OTHER_CHILD
        tracked = bn._buffers
        if len(conv._parameters) != 2 or len(bn._parameters) != 2 or len(tracked) != 3:
            return "a child whose parameters were moved"  # by FSDP or old weight_norm
        if has_hooks(conv) or has_hooks(bn) or has_global_hooks():
            return "hooks on a child"
        if (tracked["running_mean"] is None) != (tracked["running_var"] is None):
            return "a batch norm with one running statistic"
        momentum = bn.momentum
        if momentum is not None and momentum < 0:
            return "a negative momentum"
        scale = self._present_scale()
        if isinstance(scale, Tensor) and scale.dim() > 0:
            shape = scale.shape
            grows = len(shape) == 3 and shape[0] > 1 and conv.out_channels == 1
            if grows or len(shape) > 3 or tuple(shape[-2:]) != (1, 1)[: len(shape)]:
                return "a scale that is neither a scalar nor one value per channel"
        return None if self._bare else self.epilogue.why_chain()

    def _scaled(self, scale: Scale) -> tuple[Encoded, tuple[Tensor, ...]]:
        """The program after the batch norm, and its operands."""
        operands = () if self._bare else tuple(self.epilogue.operands())
        if isinstance(scale, Tensor):
            return self._after_tensor, (scale, *operands)
        if scale == self._after_of:
            return self._after_number, operands
        steps = [step.step() for step in self.epilogue]
        return encode((mul(scale), *steps)), operands

    def call_arguments(self, x: Tensor) -> Call:
        """Arguments of the operator for a call now; `why_chain` is None."""
        # The children are plain, so their dictionaries are read: attributes cost seven times more.
        children: Any = self._modules
        conv, bn = children["conv"], children["bn"]
        layer, affine, tracked = conv._parameters, bn._parameters, bn._buffers
        mean, var, count = tracked["running_mean"], tracked["running_var"], None
        training = mean is None
        if bn.training:
            training = True
            if bn.track_running_stats:
                count = tracked["num_batches_tracked"]
            else:
                mean = var = None
        momentum = bn.momentum
        momentum = encode_momentum(None, count) if momentum is None else momentum
        statistics = (affine["weight"], affine["bias"], mean, var, count)
        after, operands = self._scaled(self._present_scale())
        if conv.padding_mode != "zeros":
            x = pad_input(x, conv._reversed_padding_repeated_twice, conv.padding_mode)
        weight, snapshot = layer["weight"], self.snapshot
        if snapshot is not None and weight is not self._frozen_of[0]:
            snapshot = None  # another weight, as of functional_call
        given = settings_of(conv, weight) == self._geometry_of
        return Call(
            x,
            weight,
            layer["bias"],
            snapshot,
            self._geometry if given else self._make_geometry(),
            EMPTY,
            (),
            self.precision or config.current_precision(),
            Norm(*statistics, training, momentum, bn.eps, after, operands),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``program(bn(conv(x)) * scaling_factor)``.

        Parameters
        ----------
        x : Tensor
            ``(N, C, H, W)``.

        Returns
        -------
        Tensor
            ``(N, K, P, Q)``, in torch's memory format.

        Raises
        ------
        ValueError
            For one value per channel in training, and for an input that is not 4D; no statistic
            has changed then.
        RuntimeError
            If shapes or dtypes do not fit.
        TypeError
            If x is no tensor.
        """
        if not isinstance(x, Tensor):
            _gate.check_tensor(x)
        reason = self.why_chain()
        return self._chain(x, reason) if reason else run(self.call_arguments(x), self._memo)

    def _chain(self, x: Tensor, reason: str) -> Tensor:
        conv, bn = self.conv, self.bn
        plain = type(conv) is nn.Conv2d and conv.padding_mode == "zeros"
        if plain and refuses_one_value(bn) and x.dim() == 4:
            shape = output_shape(x, conv.weight, conv.bias, self._make_geometry())
            check_one_value(shape, bn.training)
        with _children.report(BATCH_NORM, reason, x, self.precision, is_strict):
            value: Tensor = self.epilogue(bn(conv(x)) * self.scaling_factor)
            return value

    @classmethod
    def from_torch(
        cls,
        module: nn.Module,
        *,
        epilogue: Program = (),
        precision: config.Precision | None = None,
    ) -> "Conv2dBatchNorm2dScale":
        """Make a module that shares ``conv``, ``bn`` and ``scaling_factor`` of `module`.

        A factor that is a buffer of `module`'s ``state_dict`` is one of the result's too.

        Raises
        ------
        TypeError
            If one of the three is missing or of another type. Hooks on the children stay: while
            there are any, the plain chain runs.

        Examples
        --------
        >>> import torch, pycutfuse as pcf
        >>> layer = pcf.nn.Conv2dBatchNorm2dScale(3, 4, 3, 2.0)
        >>> pcf.nn.Conv2dBatchNorm2dScale.from_torch(layer.to_torch()).conv is layer.conv
        True
        """
        for name, expected in (("conv", nn.Conv2d), ("bn", nn.BatchNorm2d)):
            child = getattr(module, name, None)
            check_source(cls.__name__, child, expected, name)  # type: ignore[arg-type]
        scale: Any = getattr(module, "scaling_factor", None)
        check_program(epilogue)
        check_program((mul(scale), *epilogue))
        made = cls.__new__(cls)
        PackedModule.__init__(made, precision)
        made.conv, made.bn = module.conv, module.bn  # type: ignore[assignment]
        if _is_persistent(module):
            made.register_buffer("scaling_factor", scale)
        made._adopt(scale, epilogue)
        made.training = module.training
        return made

    def to_torch(self) -> nn.Module:
        """Make the plain torch chain that shares this module's children and factor."""
        scale = self._present_scale()
        made = _Chain(self.conv, self.bn, scale, self.epilogue, _is_persistent(self))
        return made.train(self.training)

    def extra_repr(self) -> str:
        scale = self._present_scale()
        shown = tuple(scale.shape) if isinstance(scale, Tensor) else scale
        return f"scaling_factor={shown}" + (", frozen" if self.frozen else "")


def _is_persistent(module: nn.Module) -> bool:
    """Whether the factor is a buffer of the ``state_dict``."""
    name = "scaling_factor"
    return name in module._buffers and name not in module._non_persistent_buffers_set


class _Chain(nn.Module):
    """The chain as a user of torch writes it."""

    scaling_factor: Scale

    def __init__(
        self,
        conv: nn.Conv2d,
        bn: nn.BatchNorm2d,
        scaling_factor: Scale,
        epilogue: Epilogue,
        persistent: bool,
    ) -> None:
        super().__init__()
        self.conv = conv
        self.bn = bn
        if isinstance(scaling_factor, Tensor) and not isinstance(scaling_factor, nn.Parameter):
            self.register_buffer("scaling_factor", scaling_factor, persistent)
        else:
            self.scaling_factor = scaling_factor
        self.epilogue = epilogue

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.epilogue(self.bn(self.conv(x)) * self.scaling_factor)
        return value
