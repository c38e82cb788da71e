"""nn.Linear with a program in its epilogue."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from pycutfuse import config
from pycutfuse.nn._base import FusedModule, check_source
from pycutfuse.nn._epilogue import Epilogue, has_hooks, hold
from pycutfuse.ops import _children
from pycutfuse.ops._contraction import is_strict
from pycutfuse.ops._linear import NAME, run
from pycutfuse.program import MAX_STEPS, Encoded, Program, check_program


class Linear(FusedModule, nn.Linear):
    """``program(x @ weight.T + bias)``: torch.nn.Linear with a fused pointwise program.

    Parameters
    ----------
    in_features, out_features : int
        Sizes of the last dimension of input and output.
    bias : bool
        Learn an additive bias.
    device, dtype
        Of the parameters, as torch.
    epilogue : sequence of Step
        Steps after the bias, at most 16 with it. A Parameter in step N is registered as
        ``epilogue.N.weight``, another tensor as a buffer of that name.
    precision : {"ieee", "tf32", "torch"}, optional
        Tier of this module; None follows `pycutfuse.precision` and torch's flags. float16 and
        bfloat16 modules have one tier, and ``"torch"``.

    Attributes
    ----------
    weight : Parameter
        ``(out_features, in_features)``, initialised bitwise as torch.nn.Linear's at the same seed.
    bias : Parameter or None
        ``(out_features,)``.

    Raises
    ------
    TypeError, ValueError
        For a malformed program or an unknown precision.

    Notes
    -----
    Input ``(*, in_features)``, output ``(*, out_features)``; 1-D to N-D.

    Initialisers and ``spectral_norm`` find it, as it is an instance of torch.nn.Linear.
    A tool that puts modules of its own in place of instances drops the program with them.

    Examples
    --------
    >>> import torch, pycutfuse as pcf
    >>> layer = pcf.nn.Linear(3, 4, epilogue=(pcf.relu(),))
    >>> layer(torch.randn(2, 3)).shape
    torch.Size([2, 4])
    >>> list(layer.state_dict())
    ['weight', 'bias']
    """

    weight: nn.Parameter
    bias: nn.Parameter | None  # type: ignore[assignment]  # torch's own may be None as well
    epilogue: Epilogue

    _name = NAME
    _run: Callable[..., Tensor] = staticmethod(run)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        epilogue: Program = (),
        precision: config.Precision | None = None,
    ) -> None:
        check_program(epilogue, bias=bias)
        super().__init__(precision)
        # A throw-away nn.Linear draws the parameters: the same numbers in the same order.
        source = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._adopt(source, epilogue)

    def _adopt(self, source: nn.Linear, epilogue: Program) -> None:
        self.in_features, self.out_features = source.in_features, source.out_features
        self.weight = cast(nn.Parameter, source.weight)
        self.register_parameter("bias", source.bias)
        hold(self, epilogue)
        # Both, as a bias may be assigned later; with 16 steps there is no room for one.
        self._program = self.epilogue.encoded(bias=False)
        full = len(self.epilogue) == MAX_STEPS
        self._biased = None if full else self.epilogue.encoded(bias=True)
        self._bare = len(self.epilogue) == 0

    def reset_parameters(self) -> None:
        """Draw weight and bias again, as torch.nn.Linear does."""
        nn.Linear.reset_parameters(self)

    def frozen_weight(self) -> Tensor:
        """The weight that `freeze` splits."""
        return self.weight

    def run_arguments(
        self, input: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Encoded, list[Tensor], str]:
        """Arguments of `pycutfuse.ops._linear.run` for a call now."""
        # Dictionaries, as attributes of a module cost ten times more; not where a parametrization
        # or weight_norm took a parameter out of them.
        parameters = self._parameters
        if "weight" in parameters and "bias" in parameters:
            weight, bias = parameters["weight"], parameters["bias"]
        else:
            weight, bias = self.weight, self.bias
        operands: list[Tensor] = [] if self._bare else self.epilogue.operands()
        if bias is None:
            program = self._program
        else:
            program = self._biased or self.epilogue.encoded(bias=True)  # raises: too many steps
            operands = [bias, *operands]
        precision = self.precision or config.current_precision()
        planes, words = self.planes, self.words
        if planes is not None and weight is not self._frozen_of[0]:
            planes = words = None  # another weight, as of functional_call
        return input, cast(Tensor, weight), planes, words, program, operands, precision

    def forward(self, input: Tensor) -> Tensor:
        """Return ``program(input @ weight.T + bias)``.

        Parameters
        ----------
        input : Tensor
            ``(*, in_features)``.

        Returns
        -------
        Tensor
            ``(*, out_features)``.

        Raises
        ------
        RuntimeError
            If shapes or dtypes do not fit, as torch.nn.Linear.
        TypeError
            If `input` is no tensor.
        """
        if not self._bare:
            reason = self.epilogue.why_chain()
            if reason is not None:
                return self._chain(input, reason)
        return self._run(*self.run_arguments(input), self._memo)

    def _chain(self, x: Tensor, reason: str) -> Tensor:
        with _children.report(self._name, reason, x, self.precision, is_strict):
            return self._plain(x)

    def _plain(self, x: Tensor) -> Tensor:
        value: Tensor = self.epilogue(nn.functional.linear(x, self.weight, self.bias))
        return value

    @classmethod
    def from_torch(
        cls,
        module: nn.Linear,
        *,
        epilogue: Program = (),
        precision: config.Precision | None = None,
    ) -> "Linear":
        """Make a module that shares `module`'s parameters.

        Raises
        ------
        TypeError
            If `module` is not exactly a torch.nn.Linear, parametrizations included.
        ValueError
            If it has hooks, which a fused call would skip.

        Examples
        --------
        >>> import torch, pycutfuse as pcf
        >>> source = torch.nn.Linear(3, 4)
        >>> pcf.nn.Linear.from_torch(source).weight is source.weight
        True
        """
        check_source(cls.__name__, module, nn.Linear, "module")
        if has_hooks(module):
            raise ValueError(
                "Linear.from_torch: module has hooks, which would be lost; remove them and "
                "register them on the result"
            )
        check_program(epilogue, bias=module.bias is not None)
        made = cls.__new__(cls)
        FusedModule.__init__(made, precision)
        made._adopt(module, epilogue)
        made.training = module.training
        return made

    def to_torch(self) -> nn.Module:
        """Make the plain torch chain that shares this module's parameters.

        Returns
        -------
        torch.nn.Module
            A torch.nn.Linear, or with a program a Sequential of it and its steps.
        """
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        plain.weight = self.weight
        plain.bias = self.bias  # type: ignore[assignment]
        chain = plain if len(self.epilogue) == 0 else nn.Sequential(plain, *self.epilogue)
        return chain.train(self.training)

    def extra_repr(self) -> str:
        shown = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{shown}, bias={self.bias is not None}" + (", frozen" if self.frozen else "")
