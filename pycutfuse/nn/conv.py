"""nn.Conv2d and nn.ConvTranspose2d with a program in their epilogue."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycutfuse import config
from pycutfuse.geometry import Geometry, conv2d_geometry, conv_transpose2d_geometry
from pycutfuse.nn._conv_base import PaddingMode, Size, TorchConv, pad_input
from pycutfuse.ops import _children, _gate
from pycutfuse.ops._conv import run
from pycutfuse.ops._conv_call import Call, is_strict
from pycutfuse.program import Program, check_program


class Conv2d(TorchConv, nn.Conv2d):
    """``program(conv2d(x) + bias)``: torch.nn.Conv2d with a fused pointwise program.

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode
        As torch.nn.Conv2d.
    device, dtype
        Of the parameters, as torch.
    epilogue : sequence of Step
        Steps after the bias, at most 16 with it. A Parameter in step N is registered as
        ``epilogue.N.weight``, another tensor as a buffer of that name; one value per channel has
        the shape ``(out_channels, 1, 1)``.
    precision : {"ieee", "tf32", "torch"}, optional
        Tier of this module; None follows `pycutfuse.precision` and torch's flags for convolutions.

    Attributes
    ----------
    weight : Parameter
        ``(out_channels, in_channels / groups, *kernel_size)``, initialised bitwise as
        torch.nn.Conv2d's at the same seed.
    bias : Parameter or None
        ``(out_channels,)``.

    Raises
    ------
    TypeError, ValueError
        As torch.nn.Conv2d; also for a malformed program or an unknown precision.

    Notes
    -----
    Input ``(N, C, H, W)`` or ``(C, H, W)``. A padding mode other than ``"zeros"`` pads first, in a
    pass of its own, as torch does.

    Initialisers and ``spectral_norm`` find it, as it is an instance of torch.nn.Conv2d.
    A tool that puts modules of its own in place of instances drops the program with them.

    Examples
    --------
    >>> import torch, pycutfuse as pcf
    >>> layer = pcf.nn.Conv2d(3, 4, 3, padding=1, epilogue=(pcf.relu(),))
    >>> layer(torch.randn(2, 3, 8, 8)).shape
    torch.Size([2, 4, 8, 8])
    >>> list(layer.state_dict())
    ['weight', 'bias']
    """

    _torch_class = nn.Conv2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        epilogue: Program = (),
        precision: config.Precision | None = None,
    ) -> None:
        check_program(epilogue, bias=bias)
        super().__init__(precision)
        # A throw-away module of torch draws the parameters: the same numbers in the same order.
        given = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
        source = nn.Conv2d(*given, padding_mode, device, dtype)
        self._adopt(source, epilogue)

    def _make_geometry(self, weight: Tensor, output_padding: Size) -> Geometry:
        padding = self.padding if self.padding_mode == "zeros" else 0
        return conv2d_geometry(weight, self.stride, padding, self.dilation, self.groups)

    def run_arguments(self, input: Tensor) -> Call:
        """Arguments of `pycutfuse.ops._conv.run` for a call now."""
        if self.padding_mode != "zeros":
            input = pad_input(input, self._reversed_padding_repeated_twice, self.padding_mode)
        return self._call(input)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``program(conv2d(input) + bias)``.

        Parameters
        ----------
        input : Tensor
            ``(N, C, H, W)`` or ``(C, H, W)``.

        Returns
        -------
        Tensor
            ``(N, K, P, Q)`` or ``(K, P, Q)``, in torch's memory format.

        Raises
        ------
        RuntimeError
            If shapes or dtypes do not fit, as torch.nn.Conv2d.
        TypeError
            If `input` is no tensor.
        """
        if not self._bare:
            reason = self.epilogue.why_chain()
            if reason is not None:
                return self._chain(input, reason)
        return run(self.run_arguments(input), self._memo)

    def _chain(self, x: Tensor, reason: str) -> Tensor:
        with _children.report("conv2d", reason, x, self.precision, is_strict):
            value = nn.Conv2d._conv_forward(self, x, self.weight, self.bias)
            result: Tensor = self.epilogue(value)
            return result

    @classmethod
    def from_torch(
        cls,
        module: nn.Conv2d,
        *,
        epilogue: Program = (),
        precision: config.Precision | None = None,
    ) -> "Conv2d":
        """Make a module that shares `module`'s parameters.

        Raises
        ------
        TypeError
            If `module` is not exactly a torch.nn.Conv2d, parametrizations included.
        ValueError
            If it has hooks, which a fused call would skip.

        Examples
        --------
        >>> import torch, pycutfuse as pcf
        >>> source = torch.nn.Conv2d(3, 4, 3)
        >>> pcf.nn.Conv2d.from_torch(source).weight is source.weight
        True
        """
        return cast(Conv2d, cls._share(module, epilogue, precision))


class ConvTranspose2d(TorchConv, nn.ConvTranspose2d):
    """``program(conv_transpose2d(x) + bias)``: torch.nn.ConvTranspose2d with a fused program.

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation
        As torch.nn.ConvTranspose2d, in its order.
    padding_mode : {"zeros"}
        As torch.
    device, dtype, epilogue, precision
        As `Conv2d`.

    Attributes
    ----------
    weight : Parameter
        ``(in_channels, out_channels / groups, *kernel_size)``, initialised bitwise as
        torch.nn.ConvTranspose2d's at the same seed.
    bias : Parameter or None
        ``(out_channels,)``.

    Raises
    ------
    TypeError, ValueError
        As torch.nn.ConvTranspose2d; also for a malformed program or an unknown precision.

    Notes
    -----
    Initialisers and ``spectral_norm`` find it, as it is an instance of torch.nn.ConvTranspose2d.
    A tool that puts modules of its own in place of instances drops the program with them.

    Examples
    --------
    >>> import torch, pycutfuse as pcf
    >>> layer = pcf.nn.ConvTranspose2d(3, 4, 2, stride=2)
    >>> layer(torch.randn(1, 3, 5, 5), output_size=(11, 10)).shape
    torch.Size([1, 4, 11, 10])
    """

    _torch_class = nn.ConvTranspose2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        output_padding: int | tuple[int, int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, int] = 1,
        padding_mode: PaddingMode = "zeros",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        epilogue: Program = (),
        precision: config.Precision | None = None,
    ) -> None:
        check_program(epilogue, bias=bias)
        super().__init__(precision)
        given = (in_channels, out_channels, kernel_size, stride, padding, output_padding, groups)
        source = nn.ConvTranspose2d(*given, bias, dilation, padding_mode, device, dtype)
        self._adopt(source, epilogue)

    def _make_geometry(self, weight: Tensor, output_padding: Size) -> Geometry:
        if self.padding_mode != "zeros":
            raise ValueError(
                f"conv_transpose2d: padding_mode is {self.padding_mode!r}; it must be 'zeros'"
            )
        if isinstance(self.padding, str):
            raise TypeError(f"conv_transpose2d: padding is {self.padding!r}; it must be numbers")
        rest = (output_padding, self.groups, self.dilation)
        return conv_transpose2d_geometry(self.stride, self.padding, *rest)

    def run_arguments(self, input: Tensor, output_size: Sequence[int] | None = None) -> Call:
        """Arguments of `pycutfuse.ops._conv.run` for a call now."""
        return self._call(input, None if output_size is None else self._extra(input, output_size))

    def _extra(self, x: Tensor, output_size: Sequence[int]) -> list[int]:
        """Output padding that gives `output_size`, found by torch's own method."""
        rule: Any = nn.ConvTranspose2d._output_padding
        settings = (self.stride, self.padding, self.kernel_size, 2, self.dilation)
        found: list[int] = rule(self, x, list(output_size), *settings)
        return found

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Return ``program(conv_transpose2d(input) + bias)``.

        Parameters
        ----------
        input : Tensor
            ``(N, C, H, W)`` or ``(C, H, W)``.
        output_size : sequence of int, optional
            Height and width of the result, where a stride leaves a choice; its output padding
            replaces the module's.

        Returns
        -------
        Tensor
            ``(N, K, P, Q)`` or ``(K, P, Q)``, in torch's memory format.

        Raises
        ------
        RuntimeError
            If shapes or dtypes do not fit, as torch.nn.ConvTranspose2d.
        ValueError
            If `output_size` is out of reach.
        TypeError
            If `input` is no tensor.
        """
        if not isinstance(input, Tensor):
            _gate.check_tensor(input)
        if not self._bare:
            reason = self.epilogue.why_chain()
            if reason is not None:
                return self._chain(input, output_size, reason)
        return run(self.run_arguments(input, output_size), self._memo)

    def _chain(self, x: Tensor, output_size: Sequence[int] | None, reason: str) -> Tensor:
        extra = self.output_padding if output_size is None else self._extra(x, output_size)
        self._make_geometry(self.weight, extra)  # raises, as torch, for what was assigned
        given: Any = (self.stride, self.padding, extra, self.groups, self.dilation)
        with _children.report("conv_transpose2d", reason, x, self.precision, is_strict):
            result: Tensor = self.epilogue(F.conv_transpose2d(x, self.weight, self.bias, *given))
            return result

    @classmethod
    def from_torch(
        cls,
        module: nn.ConvTranspose2d,
        *,
        epilogue: Program = (),
        precision: config.Precision | None = None,
    ) -> "ConvTranspose2d":
        """Make a module that shares `module`'s parameters; raises as `Conv2d.from_torch`.

        Examples
        --------
        >>> import torch, pycutfuse as pcf
        >>> source = torch.nn.ConvTranspose2d(3, 4, 3)
        >>> pcf.nn.ConvTranspose2d.from_torch(source).weight is source.weight
        True
        """
        return cast(ConvTranspose2d, cls._share(module, epilogue, precision))
