"""What the fused modules share: frozen planes, and refusals."""

import copy
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from pycutfuse import config
from pycutfuse.ops import _frozen
from pycutfuse.ops._memo import Memo

Self = TypeVar("Self", bound="FusedModule")


class FusedModule(nn.Module):
    """A module whose float32 weight may be frozen: split once into planes that forwards reuse.

    The planes are plain attributes: tools that pair the buffers of two models, as AveragedModel,
    would pair the wrong ones. ``load_state_dict``, ``.to()`` and its relatives, ``.train()`` and
    `unfreeze` drop them; copies and pickles are made without them. A call whose weight is not the
    frozen object does not use them.
    """

    planes: Tensor | None
    words: Tensor | None
    precision: config.Precision | None

    _frozen_tensors: ClassVar[tuple[str, ...]] = ("planes", "words")
    _holders: ClassVar[tuple[str, ...]] = ()  # children that hold the frozen weights
    # The frozen weights, in a tuple lest torch takes them for further parameters.
    _frozen_of: tuple[Tensor | None, Tensor | None] = (None, None)
    _load_hooks: tuple[Callable[[], object], ...] = ()  # each removes one

    def __init__(self, precision: config.Precision | None) -> None:
        nn.Module.__init__(self)  # not that of a class of torch that a module also inherits
        self.precision = precision
        self._memo = Memo()
        for name in self._frozen_tensors:
            setattr(self, name, None)

    def frozen_weight(self) -> Tensor | None:
        """The weight that `freeze` splits; None of a child that has none."""
        raise NotImplementedError

    @property
    def frozen(self) -> bool:
        """Whether there are planes made by `freeze`."""
        return self.__dict__[self._frozen_tensors[0]] is not None

    def check_evaluates(self) -> None:
        """Raise RuntimeError in training mode."""
        if self.training:
            raise RuntimeError(
                f"freeze: {type(self).__name__} is in training mode, where its weight changes; "
                "call .eval() first"
            )

    def freeze(self) -> None:
        """Make the planes now, on the current stream. See `pycutfuse.freeze`."""
        self.check_evaluates()
        self.unfreeze()
        weight = self.frozen_weight()
        if not isinstance(weight, nn.Parameter):
            config.report_fallback("freeze", why_no_parameter(weight))
            return
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "freeze was called while a CUDA graph is captured; call it before the capture"
            )
        self._freeze_weight(weight)
        if not self.frozen:
            return
        self._frozen_of = weight, None
        for remove in self._load_hooks:
            remove()
        hook, children = _Unfreeze(self), [self.get_submodule(name) for name in self._holders]
        handles = [_on_load(child, hook) for child in children]  # a child may outlive the module
        self._load_hooks = tuple([weakref.finalize(self, one.remove) for one in handles])

    def _freeze_weight(self, weight: Tensor) -> None:
        if weight.is_cuda and weight.dtype in (torch.float16, torch.bfloat16):
            return  # multiplied as it is: there is nothing to make
        reason = _frozen.why_not_frozen(weight)
        if reason is not None:
            config.report_fallback("freeze", reason)
            return
        with torch.no_grad():
            tier = config.resolve_tier(self.precision or config.current_precision())
            tier = "tf32" if tier == "tf32" else "ieee"
            self.planes, self.words = _frozen.make_planes(weight, tier)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "precision":
            config.check_precision(value)
        if isinstance(value, nn.Module) and "_memo" in self.__dict__:
            self._memo.forget_replay()  # it would keep the child that is replaced
        super().__setattr__(name, value)

    def unfreeze(self) -> None:
        """Drop the planes; the weight is split at every call again."""
        self._memo.forget_replay()
        planes = self.planes
        if planes is not None:
            _frozen.forget(planes)
            self.planes = self.words = None
            self._frozen_of = None, None

    def train(self: Self, mode: bool = True) -> Self:
        """Set training mode; entering it drops frozen planes."""
        if mode:
            self.unfreeze()
        return super().train(mode)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register `param`; a new weight drops frozen planes."""
        if self._frozen_tensors[0] in self.__dict__:
            self.unfreeze()
        super().register_parameter(name, param)

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.unfreeze()
        parent: Any = super()  # _apply is untyped
        return cast(Self, parent._apply(fn, recurse))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.unfreeze()
        parent: Any = super()
        parent._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        parent: Any = super()  # which leaves out what compile() made: it calls this very module
        state: dict[str, Any] = parent.__getstate__()
        state["_memo"] = None
        state |= {"_frozen_of": (None, None), "_load_hooks": ()}
        return state | dict.fromkeys(self._frozen_tensors)

    def __setstate__(self, state: dict[str, Any]) -> None:
        parent: Any = super()
        parent.__setstate__({**state, **dict.fromkeys(self._frozen_tensors), "_memo": Memo()})
        for name in self._frozen_tensors:  # where earlier pickles have them
            self._buffers.pop(name, None)

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        """As without this method; the class that a parametrization makes has no state to give."""
        kind: Any = type(self)
        whole: Any = super(kind, self) if "parametrizations" in self._modules else self
        made: Self = kind.__new__(kind)
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(whole.__getstate__(), memo))
        return made

    def __prepare_scriptable__(self) -> NoReturn:
        raise NotImplementedError(
            f"torch.jit.script does not support pycutfuse.nn.{type(self).__name__}; "
            "use torch.compile, torch.export, or .to_torch() before scripting"
        )


def _on_load(module: nn.Module, hook: "_Unfreeze") -> RemovableHandle:
    untyped: Any = module
    handle: RemovableHandle = untyped.register_load_state_dict_pre_hook(hook)
    return handle


class _Unfreeze:
    """A hook of a child: loading its weight unfreezes the module. Copies of it do nothing."""

    def __init__(self, module: FusedModule | None = None) -> None:
        self._module = None if module is None else weakref.ref(module)

    def __call__(self, *_: Any) -> None:
        module = None if self._module is None else self._module()
        if module is not None:
            module.unfreeze()

    def __reduce__(self) -> tuple[type["_Unfreeze"], tuple[()]]:
        return _Unfreeze, ()


def why_no_parameter(weight: object) -> str:
    """Why `weight`, which is no Parameter, is not frozen."""
    if weight is None:
        return "a child without a weight"
    return "a weight that is computed anew at each call"


def refuses_one_value(norm: nn.Module) -> bool:
    """Whether `norm` refuses one value per channel in training, as torch's batch norms.

    SyncBatchNorm and others with a forward of their own may ask other processes for more.
    """
    return isinstance(norm, _BatchNorm) and type(norm).forward is _BatchNorm.forward


def check_source(kind: str, module: nn.Module, expected: type[nn.Module], name: str) -> None:
    """Raise TypeError unless `module` is exactly an `expected`: a subclass may do other things."""
    if type(module) is not expected:
        raise TypeError(
            f"{kind}.from_torch: {name} is a {type(module).__name__}; "
            f"it must be a plain torch.nn.{expected.__name__}"
        )


def _fused_in(module: nn.Module, who: str) -> list[FusedModule]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{who}: a {type(module).__name__}; it must be a torch.nn.Module")
    return [child for child in module.modules() if isinstance(child, FusedModule)]


def freeze(module: nn.Module) -> None:
    """Freeze every fused module inside `module`. See `pycutfuse.freeze`."""
    found = _fused_in(module, "freeze")
    if not found:
        raise ValueError(
            f"{type(module).__name__} has no pycutfuse module to freeze; replace its layers with "
            "pycutfuse.nn modules first"
        )
    for child in found:
        child.check_evaluates()
    for child in found:
        child.freeze()


def unfreeze(module: nn.Module) -> None:
    """Drop the planes of every fused module inside `module`."""
    for child in _fused_in(module, "unfreeze"):
        child.unfreeze()
