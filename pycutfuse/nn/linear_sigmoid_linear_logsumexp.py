"""Linear -> sigmoid -> Linear -> logsumexp over the features."""

from typing import Any

import torch
from torch import Tensor, nn

from pycutfuse import config
from pycutfuse.nn._base import FusedModule, check_source, why_no_parameter
from pycutfuse.nn._epilogue import has_global_hooks, has_hooks
from pycutfuse.ops import _children, _frozen, _gate
from pycutfuse.ops._chain import NAME, Call, ChainMemo, Layer, run
from pycutfuse.ops._contraction import is_strict
from pycutfuse.program import EMPTY, encode, sigmoid


class LinearSigmoidLinearLogSumExp(FusedModule):
    r"""``logsumexp(linear2(sigmoid(linear1(x))), dim=1)``, planned as one; logits are not stored.

    Parameters
    ----------
    input_size, hidden_size, output_size : int
        Sizes of the two linear layers; `output_size` is reduced.
    device, dtype
        Of the parameters, as torch.
    precision : {"ieee", "tf32", "torch"}, optional
        Tier of this module; None follows `pycutfuse.precision` and torch's flags.

    Attributes
    ----------
    linear1, linear2 : torch.nn.Linear
        Drawn in this order. While one of them has hooks, a parametrization or another type, the
        plain chain runs.

    Raises
    ------
    ValueError
        For an unknown precision.

    Notes
    -----
    Input ``(N, input_size)``, output ``(N,)``. `pycutfuse.freeze` keeps planes of both weights.
    Gradients are once differentiable on the fused path; backward contracts both layers again.

    Examples
    --------
    >>> import torch, pycutfuse as pcf
    >>> layer = pcf.nn.LinearSigmoidLinearLogSumExp(3, 4, 5)
    >>> layer(torch.randn(2, 3)).shape
    torch.Size([2])
    >>> list(layer.state_dict())
    ['linear1.weight', 'linear1.bias', 'linear2.weight', 'linear2.bias']
    """

    linear1: nn.Linear
    linear2: nn.Linear
    _memo: ChainMemo
    planes2: Tensor | None
    words2: Tensor | None

    _frozen_tensors = ("planes", "words", "planes2", "words2")
    _holders = ("linear1", "linear2")
    # Without and with a bias. Of the class, as Dynamo would take a global's floats for variables;
    # indexed by ints, as it would raise at a bool (torch 2.11).
    _sigmoid = encode((sigmoid(),)), encode((sigmoid(),), bias=True)
    _identity = EMPTY, encode((), bias=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        output_size: int,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        precision: config.Precision | None = None,
    ) -> None:
        self._begin(precision)
        self.linear1 = nn.Linear(input_size, hidden_size, device=device, dtype=dtype)
        self.linear2 = nn.Linear(hidden_size, output_size, device=device, dtype=dtype)

    def _begin(self, precision: config.Precision | None) -> None:
        FusedModule.__init__(self, precision)
        self._memo = ChainMemo()

    def frozen_weight(self) -> Tensor | None:
        """The first of the weights that `freeze` splits."""
        return getattr(self.linear1, "weight", None)

    def freeze(self) -> None:
        """Make the planes of both weights now, on the current stream. See `pycutfuse.freeze`."""
        super().freeze()
        if not self.frozen:
            return
        weight: Any = getattr(self.linear2, "weight", None)
        learned = isinstance(weight, nn.Parameter)
        reason = _frozen.why_not_frozen(weight) if learned else why_no_parameter(weight)
        if reason is not None:
            self.unfreeze()
            config.report_fallback("freeze", reason)
            return
        with torch.no_grad():
            tier = config.resolve_tier(self.precision or config.current_precision())
            tier = "tf32" if tier == "tf32" else "ieee"
            self.planes2, self.words2 = _frozen.make_planes(weight, tier)
        self._frozen_of = self.linear1.weight, weight

    def unfreeze(self) -> None:
        """Drop the planes; the weights are split at every call again."""
        super().unfreeze()
        planes = self.planes2
        if planes is not None:
            _frozen.forget(planes)
            self.planes2 = self.words2 = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._memo = ChainMemo()

    def why_chain(self, x: Tensor) -> str | None:
        """Say why the children must run one after the other, or None. Sizes are not named."""
        children: Any = self._modules
        for child in (children["linear1"], children["linear2"]):
            if type(child) is not nn.Linear:
                return _children.OTHER_CHILD
            if len(child._parameters) != 2:
                return "a child whose parameters were moved"  # by FSDP or old weight_norm
            if has_hooks(child):
                return "hooks on a child"
        if has_global_hooks():
            return "hooks on a child"
        return None if x.dim() == 2 else f"an input of {x.dim()} dimensions"

    def call_arguments(self, x: Tensor) -> Call:
        """Arguments of the operator for a call now; `why_chain` is None."""
        # The children are plain, so their dictionaries are read: attributes cost seven times more.
        children: Any = self._modules
        first, second = children["linear1"]._parameters, children["linear2"]._parameters
        bias, bias2 = first["bias"], second["bias"]
        own = self.__dict__
        planes, words = own["planes"], own["words"]
        planes2, words2 = own["planes2"], own["words2"]
        if planes is not None:  # not of another weight, as of functional_call
            if first["weight"] is not self._frozen_of[0]:
                planes = words = None
            if second["weight"] is not self._frozen_of[1]:
                planes2 = words2 = None
        return Call(
            x,
            Layer(
                first["weight"],
                planes,
                words,
                self._sigmoid[0 if bias is None else 1],
                () if bias is None else (bias,),
            ),
            Layer(
                second["weight"],
                planes2,
                words2,
                self._identity[0 if bias2 is None else 1],
                () if bias2 is None else (bias2,),
            ),
            self.precision or config.current_precision(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``logsumexp(linear2(sigmoid(linear1(x))), dim=1)``.

        Parameters
        ----------
        x : Tensor
            ``(N, input_size)``; with more dimensions the plain chain runs, which reduces dim 1.

        Returns
        -------
        Tensor
            ``(N,)``.

        Raises
        ------
        IndexError
            If x has one dimension.
        RuntimeError
            If shapes or dtypes do not fit.
        TypeError
            If x is no tensor.
        """
        if not isinstance(x, Tensor):
            _gate.check_tensor(x)
        reason = self.why_chain(x)
        if reason is not None:
            return self._chain(x, reason)
        return run(self.call_arguments(x), self._memo)

    def _chain(self, x: Tensor, reason: str) -> Tensor:
        with _children.report(NAME, reason, x, self.precision, is_strict):
            return _forward(self, x)

    @classmethod
    def from_torch(
        cls, module: nn.Module, *, precision: config.Precision | None = None
    ) -> "LinearSigmoidLinearLogSumExp":
        """Make a module that shares the children ``linear1`` and ``linear2`` of `module`.

        Raises
        ------
        TypeError
            If one of them is missing or no plain torch.nn.Linear. Hooks on the children stay: while
            there are any, the plain chain runs.

        Examples
        --------
        >>> import torch, pycutfuse as pcf
        >>> layer = pcf.nn.LinearSigmoidLinearLogSumExp(3, 4, 5)
        >>> made = pcf.nn.LinearSigmoidLinearLogSumExp.from_torch(layer.to_torch())
        >>> made.linear1 is layer.linear1
        True
        """
        for name in ("linear1", "linear2"):
            child: Any = getattr(module, name, None)
            check_source(cls.__name__, child, nn.Linear, name)
        made = cls.__new__(cls)
        made._begin(precision)
        made.linear1, made.linear2 = module.linear1, module.linear2  # type: ignore[assignment]
        made.training = module.training
        return made

    def to_torch(self) -> nn.Module:
        """Make the plain torch chain that shares this module's children."""
        return _Chain(self.linear1, self.linear2).train(self.training)

    def extra_repr(self) -> str:
        return "frozen" if self.frozen else ""


class _Chain(nn.Module):
    """The chain as a user of torch writes it."""

    def __init__(self, linear1: nn.Linear, linear2: nn.Linear) -> None:
        super().__init__()
        self.linear1 = linear1
        self.linear2 = linear2

    def forward(self, x: Tensor) -> Tensor:
        return _forward(self, x)


def _forward(module: "LinearSigmoidLinearLogSumExp | _Chain", x: Tensor) -> Tensor:
    return torch.logsumexp(module.linear2(torch.sigmoid(module.linear1(x))), dim=1)
