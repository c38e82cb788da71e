"""What the modules of convolutions share: frozen weights in packed form, and padding modes."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from pycutfuse import config
from pycutfuse.geometry import Geometry
from pycutfuse.nn._base import FusedModule, check_source
from pycutfuse.nn._epilogue import Epilogue, has_hooks, hold
from pycutfuse.ops import _conv_packed
from pycutfuse.ops._conv_call import Call
from pycutfuse.ops._conv_memo import ConvMemo
from pycutfuse.program import Program, check_program

Size = int | Sequence[int]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
Torch = nn.Conv2d | nn.ConvTranspose2d
# What torch's constructor leaves on the module, and its forward reads at each call.
_SETTINGS = (
    "in_channels",
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "transposed",
    "output_padding",
    "groups",
    "padding_mode",
    "_reversed_padding_repeated_twice",
)


class PackedModule(FusedModule):
    """A module whose weight may be frozen: packed at the first forward of each input size.

    ``snapshot`` is the weight as it was; its packed forms are kept and dropped with it.
    """

    snapshot: Tensor | None
    _memo: ConvMemo  # type: ignore[assignment]

    _frozen_tensors: ClassVar[tuple[str, ...]] = ("snapshot",)
    _forms: _conv_packed.Frozen | None = None

    def __init__(self, precision: config.Precision | None) -> None:
        super().__init__(precision)
        self._memo = ConvMemo()

    def _freeze_weight(self, weight: Tensor) -> None:
        reason = _conv_packed.why_not_frozen(weight)
        if reason is not None:
            config.report_fallback("freeze", reason)
            return
        self._forms = _conv_packed.freeze(weight)
        self.snapshot = self._forms.snapshot

    def unfreeze(self) -> None:
        """Drop the packed forms; the weight is packed at every call again."""
        if self.snapshot is not None:
            self._forms = self.snapshot = None
            self._frozen_of = None, None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_forms": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._memo = ConvMemo()


def settings_of(module: nn.Module, weight: Tensor) -> tuple[Any, ...]:
    """What the geometry of a convolution of torch, or of `TorchConv`, depends on now."""
    own = module.__dict__
    names = ("padding", "stride", "dilation", "output_padding", "groups", "padding_mode")
    found = [own[name] for name in names]
    if found[0] == "same":
        found.append(weight.shape[2:])
    return tuple(found)


def pad_input(x: Tensor, padding: Sequence[int], mode: str) -> Tensor:
    """`x` padded by torch; `padding` is left, right, above, below.

    Raises
    ------
    RuntimeError
        As torch, if the padding is too large for "reflect" or "circular".
    """
    if mode in ("reflect", "circular") and isinstance(x, Tensor) and x.dim() in (3, 4):
        for size, most in ((x.shape[-1], max(padding[:2])), (x.shape[-2], max(padding[2:]))):
            limit = size - 1 if mode == "reflect" else size
            if most > limit:
                raise RuntimeError(
                    f"padding is {most} but padding_mode={mode!r} allows at most {limit} for "
                    f"x of {size} pixels (shape {tuple(x.shape)}); use a larger x or less padding"
                )
    return F.pad(x, list(padding), mode=mode)


class TorchConv(PackedModule, _ConvNd):
    """What Conv2d and ConvTranspose2d share: torch's settings and parameters, and a program."""

    _torch_class: ClassVar[type[Torch]]
    epilogue: Epilogue

    def _adopt(self, source: Torch, epilogue: Program) -> None:
        for name in _SETTINGS:
            setattr(self, name, getattr(source, name))
        self.weight = cast(nn.Parameter, source.weight)
        self.register_parameter("bias", cast("nn.Parameter | None", source.bias))
        hold(self, epilogue)
        self._program = self.epilogue.encoded(bias=False)
        self._bare = len(self.epilogue) == 0
        self._geometry_of = settings_of(self, source.weight)
        self._geometry = self._make_geometry(source.weight, self.output_padding)

    def _make_geometry(self, weight: Tensor, output_padding: Size) -> Geometry:
        raise NotImplementedError

    def _present_geometry(self, weight: Tensor) -> Geometry:
        """The geometry now; settings may be assigned, as in torch."""
        if settings_of(self, weight) == self._geometry_of:
            return self._geometry
        return self._make_geometry(weight, self.output_padding)

    def reset_parameters(self) -> None:
        """Draw weight and bias again, as torch does."""
        self._torch_class.reset_parameters(self)

    def frozen_weight(self) -> Tensor:
        """The weight that `freeze` packs."""
        return self.weight

    def _call(self, x: Tensor, output_padding: Size | None = None) -> Call:
        """Arguments of a call now; `output_padding` replaces the module's."""
        # Dictionaries, as attributes of a module cost ten times more; not where a parametrization
        # or weight_norm took a parameter out of them.
        parameters: dict[str, Any] = self._parameters
        if "weight" in parameters and "bias" in parameters:
            weight, bias = parameters["weight"], parameters["bias"]
        else:
            weight, bias = self.weight, self.bias
        if output_padding is None:
            geometry = self._present_geometry(weight)
        else:
            geometry = self._make_geometry(weight, output_padding)
        operands = () if self._bare else tuple(self.epilogue.operands())
        precision = self.precision or config.current_precision()
        snapshot, program = self.snapshot, self._program
        if snapshot is not None and weight is not self._frozen_of[0]:
            snapshot = None  # another weight, as of functional_call
        return Call(x, weight, bias, snapshot, geometry, program, operands, precision)

    @classmethod
    def _share(
        cls, module: Torch, epilogue: Program, precision: config.Precision | None
    ) -> "TorchConv":
        check_source(cls.__name__, module, cls._torch_class, "module")
        if has_hooks(module):
            raise ValueError(
                f"{cls.__name__}.from_torch: module has hooks, which would be lost; remove them "
                "and register them on the result"
            )
        check_program(epilogue, bias=module.bias is not None)
        made = cls.__new__(cls)
        PackedModule.__init__(made, precision)
        made._adopt(module, epilogue)
        made.training = module.training
        return made

    def to_torch(self) -> nn.Module:
        """Make the plain torch chain that shares this module's parameters.

        Returns
        -------
        torch.nn.Module
            torch's module of the same name, or with a program a Sequential of it and its steps.
        """
        plain = self._torch_class(1, 1, 1, device="meta")
        for name in _SETTINGS:
            setattr(plain, name, getattr(self, name))
        plain.weight = self.weight
        plain.bias = self.bias
        chain = plain if len(self.epilogue) == 0 else nn.Sequential(plain, *self.epilogue)
        return chain.train(self.training)

    def extra_repr(self) -> str:
        untyped: Any = self._torch_class
        shown: str = untyped.extra_repr(self)
        return shown + (", frozen" if self.frozen else "")
