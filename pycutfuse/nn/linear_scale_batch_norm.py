"""Linear -> scale -> BatchNorm1d."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pycutfuse import config
from pycutfuse.nn._base import FusedModule, check_source, refuses_one_value
from pycutfuse.nn._epilogue import Epilogue, has_global_hooks, has_hooks
from pycutfuse.ops import _children, _gate
from pycutfuse.ops._contraction import is_strict
from pycutfuse.ops._linear_batch_norm import encode_momentum, run
from pycutfuse.ops._linear_batch_norm_planned import record
from pycutfuse.ops._linear_batch_norm_raw import NAME, Call
from pycutfuse.ops._memo import Replay
from pycutfuse.ops._replay import Seen, Source
from pycutfuse.program import OPS, Encoded, Program, check_program


class LinearScaleBatchNorm1d(FusedModule):
    """``program(bn(gemm(x) * scale))``, one fused pass over the product.

    Parameters
    ----------
    in_features, out_features : int
        Sizes of the linear layer.
    scale_shape : sequence of int
        Shape of the learned scale, broadcast against ``(N, out_features)``.
    eps, momentum
        Of the batch norm; ``momentum=None`` averages over all batches.
    device, dtype
        Of the parameters, as torch.
    epilogue : sequence of Step
        Steps after the batch norm; a Parameter in step N becomes ``epilogue.N.weight``.
    precision : {"ieee", "tf32", "torch"}, optional
        Tier of this module; None follows `pycutfuse.precision` and torch's flags. float16 and
        bfloat16 modules have one tier, and ``"torch"``.

    Attributes
    ----------
    gemm : torch.nn.Linear
    scale : Parameter
        ``scale_shape``, drawn from N(0, 1).
    bn : torch.nn.BatchNorm1d
        Its ``training``, ``momentum``, ``affine`` and running statistics are read at each call.

    Raises
    ------
    TypeError, ValueError
        For a malformed program or an unknown precision.

    Notes
    -----
    Parameters are drawn in the order gemm, scale, bn and have the keys of the chain. Input
    ``(N, in_features)``, output ``(N, out_features)``. Under autocast a float32 scale of at least
    1 dimension promotes the product, so that the plain chain runs, as `pycutfuse.explain` says.

    Examples
    --------
    >>> import torch, pycutfuse as pcf
    >>> layer = pcf.nn.LinearScaleBatchNorm1d(3, 4, (4,))
    >>> layer(torch.randn(8, 3)).shape
    torch.Size([8, 4])
    >>> [name for name, _ in layer.named_parameters()]
    ['scale', 'gemm.weight', 'gemm.bias', 'bn.weight', 'bn.bias']
    """

    gemm: nn.Linear
    scale: nn.Parameter
    bn: nn.BatchNorm1d

    _holders = ("gemm",)
    # Of the class, as Dynamo would take a global's floats for variables.
    _scale = Encoded((OPS["mul"], 0), (0.0, 0.0))
    _bias_scale = Encoded((OPS["add"], 0, OPS["mul"], 1), (0.0, 0.0, 0.0, 0.0), True)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scale_shape: Sequence[int],
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        epilogue: Program = (),
        precision: config.Precision | None = None,
    ) -> None:
        check_program(epilogue)
        super().__init__(precision)
        self.gemm = nn.Linear(in_features, out_features, device=device, dtype=dtype)
        self.scale = nn.Parameter(torch.randn(scale_shape, device=device, dtype=dtype))
        self.bn = nn.BatchNorm1d(
            out_features, eps=eps, momentum=momentum, device=device, dtype=dtype
        )
        self._set_epilogue(epilogue)

    def _set_epilogue(self, epilogue: Program) -> None:
        self.epilogue = Epilogue(epilogue)
        self._after = self.epilogue.encoded(bias=False)
        self._bare = len(self.epilogue) == 0

    def frozen_weight(self) -> Tensor | None:
        """The weight that `freeze` splits."""
        return getattr(self.gemm, "weight", None)

    def _present_scale(self) -> Tensor:
        scale = self._parameters.get("scale")  # costs a tenth of the attribute
        return self.scale if scale is None else scale

    def why_chain(self, x: Tensor) -> str | None:
        """Say why the children must run one after the other, or None. Sizes are not named."""
        return self._why_children() or self._why_shapes(x)

    def _why_children(self) -> str | None:
        children: Any = self._modules
        gemm, bn = children["gemm"], children["bn"]
        if type(gemm) is not nn.Linear or type(bn) is not nn.BatchNorm1d:
            return _children.OTHER_CHILD
        tracked = bn._buffers
        if len(gemm._parameters) != 2 or len(bn._parameters) != 2 or len(tracked) != 3:
            return "a child whose parameters were moved"  # by FSDP or old weight_norm
        if has_hooks(gemm) or has_hooks(bn) or has_global_hooks():
            return "hooks on a child"
        if (tracked["running_mean"] is None) != (tracked["running_var"] is None):
            return "a batch norm with one running statistic"
        momentum = bn.momentum
        if momentum is not None and momentum < 0:
            return "a negative momentum"
        return None if self._bare else self.epilogue.why_chain()

    def _why_shapes(self, x: Tensor) -> str | None:
        """The part that a remembered call has answered: it depends on no more than its tensors."""
        if x.dim() != 2:
            return f"an input of {x.dim()} dimensions"
        shape = self._present_scale().shape
        if len(shape) > 2 or (len(shape) == 2 and shape[0] != 1 and shape[0] != x.shape[0]):
            return "a scale that changes the output's shape"
        return "an empty batch" if x.shape[0] == 0 else None

    def call_arguments(self, x: Tensor) -> Call:
        """Arguments of the operator for a call now; `why_chain` is None."""
        # The children are plain, so their dictionaries are read: attributes cost seven times more.
        children: Any = self._modules
        gemm, bn = children["gemm"], children["bn"]
        linear, affine, tracked = gemm._parameters, bn._parameters, bn._buffers
        mean, var, count = tracked["running_mean"], tracked["running_var"], None
        training = mean is None
        if bn.training:
            training = True
            if bn.track_running_stats:
                count = tracked["num_batches_tracked"]
            else:
                mean = var = None
        weight, planes, words = linear["weight"], self.planes, self.words
        if planes is not None and weight is not self._frozen_of[0]:
            planes = words = None  # another weight, as of functional_call
        bias, scale = linear["bias"], self._present_scale()
        momentum = bn.momentum
        return Call(
            x,
            weight,
            planes,
            words,
            self._scale if bias is None else self._bias_scale,
            (scale,) if bias is None else (bias, scale),
            affine["weight"],
            affine["bias"],
            mean,
            var,
            count,
            training,
            encode_momentum(None, count) if momentum is None else momentum,
            bn.eps,
            self._after,
            () if self._bare else self.epilogue.operands(),
            self.precision or config.current_precision(),
        )

    def _record(self, call: Call) -> Replay | None:
        """What makes this call again: while all holds that `_why_children` and `call_arguments`
        read, it need not be read from Python.
        """
        seen, own = Seen(), self.__dict__
        seen.state(self.precision)
        seen.read(own, "_modules", "_parameters", "words", "precision")
        seen.read(self._modules, "gemm", "bn", "epilogue")
        steps = self.epilogue._modules
        seen.read(steps, *steps)
        for child in (self.gemm, self.bn, self.epilogue, *self.epilogue):
            seen.child(child)
        seen.read(self.bn.__dict__, "training", "track_running_stats", "momentum", "eps")
        linear, norm = self.gemm._parameters, self.bn._parameters
        if call.planes is not None:
            seen.read(linear, "weight")
        sources: list[Source] = [None, (linear, "weight"), (own, "planes")]
        if call.program is self._scale:
            seen.read(linear, "bias")
        else:
            sources.append((linear, "bias"))
        sources += [(self._parameters, "scale"), (norm, "weight"), (norm, "bias")]
        names = ("running_mean", "running_var", "num_batches_tracked")
        sources += [(self.bn._buffers, name) for name in names]
        for step in self.epilogue:
            sources += step.sources()
        return record(self, seen, sources, call, self._memo)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``program(bn(gemm(x) * scale))``.

        Parameters
        ----------
        x : Tensor
            ``(N, in_features)``.

        Returns
        -------
        Tensor
            ``(N, out_features)``.

        Raises
        ------
        ValueError
            For one sample in training, and for an input that is not 2D (or 3D, as the chain); no
            statistic has changed then.
        RuntimeError
            If shapes or dtypes do not fit.
        TypeError
            If x is no tensor.
        """
        memo = self._memo
        if not _gate.is_compiling():
            replay = memo.replay
            result = None if replay is None else replay(self, x)
            if result is not None:
                return result
        if not isinstance(x, Tensor):
            _gate.check_tensor(x)
        reason = self.why_chain(x)
        if reason is not None:
            return self._chain(x, reason)
        call = self.call_arguments(x)
        result = run(call, memo)
        if not _gate.is_compiling() and memo.is_due():
            memo.replay = self._record(call) or memo.replay
        return result

    def _chain(self, x: Tensor, reason: str) -> Tensor:
        bn = self.bn
        scale = self.scale  # of more rows, it makes more of one sample
        alone = x.dim() == 2 and scale.dim() < 3 and math.prod(scale.shape[:-1]) == 1
        if alone and refuses_one_value(bn):
            _gate.check_one_sample(x.shape[0], bn.num_features, bn.training)
        with _children.report(NAME, reason, x, self.precision, is_strict):
            value: Tensor = self.epilogue(self.bn(self.gemm(x) * self.scale))
            return value

    @classmethod
    def from_torch(
        cls,
        module: nn.Module,
        *,
        epilogue: Program = (),
        precision: config.Precision | None = None,
    ) -> "LinearScaleBatchNorm1d":
        """Make a module that shares the children ``gemm`` and ``bn`` and the ``scale`` of `module`.

        Raises
        ------
        TypeError
            If one of the three is missing or of another type. Hooks on the children stay: while
            there are any, the plain chain runs.

        Examples
        --------
        >>> import torch, pycutfuse as pcf
        >>> layer = pcf.nn.LinearScaleBatchNorm1d(3, 4, (4,))
        >>> pcf.nn.LinearScaleBatchNorm1d.from_torch(layer.to_torch()).scale is layer.scale
        True
        """
        check_program(epilogue)
        for name, expected in (("gemm", nn.Linear), ("bn", nn.BatchNorm1d)):
            child = getattr(module, name, None)
            check_source(cls.__name__, child, expected, name)  # type: ignore[arg-type]
        scale = getattr(module, "scale", None)
        if not isinstance(scale, nn.Parameter):
            raise TypeError(
                f"{cls.__name__}.from_torch: scale is a {type(scale).__name__}; "
                "it must be a Parameter"
            )
        made = cls.__new__(cls)
        FusedModule.__init__(made, precision)
        made.gemm, made.scale, made.bn = module.gemm, scale, module.bn  # type: ignore[assignment]
        made._set_epilogue(epilogue)
        made.training = module.training
        return made

    def to_torch(self) -> nn.Module:
        """Make the plain torch chain that shares this module's children and scale."""
        return _Chain(self.gemm, self.scale, self.bn, self.epilogue).train(self.training)

    def extra_repr(self) -> str:
        return f"scale={tuple(self.scale.shape)}" + (", frozen" if self.frozen else "")


class _Chain(nn.Module):
    """The chain as a user of torch writes it."""

    def __init__(
        self, gemm: nn.Linear, scale: nn.Parameter, bn: nn.BatchNorm1d, epilogue: Epilogue
    ) -> None:
        super().__init__()
        self.gemm = gemm
        self.scale = scale
        self.bn = bn
        self.epilogue = epilogue

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.epilogue(self.bn(self.gemm(x) * self.scale))
        return value
