"""What each family says of its contraction; the rest of a call is the same for all."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from pycutfuse.testing.repro.case import Case
from pycutfuse.testing.repro.envelope import Envelope, Rounding


class Operator(Protocol):
    """A contraction: torch's, ours, and its envelope.

    Attributes
    ----------
    norm_dims : int
        Dimensions of what a batch norm takes.
    torch_is_definite : bool
        torch's algorithm multiplies and adds what the definition says and nothing else, so that
        non-finite inputs stay in place and whole numbers exact.
    """

    norm_dims: int
    torch_is_definite: bool

    def product(self, case: Case) -> Tensor:
        """The contraction without a bias; of ``case.exact`` differentiable, too."""

    def contract(self, case: Case) -> Tensor:
        """The contraction with its bias, as users of torch call it."""

    def envelope(self, case: Case, rounding: Rounding) -> Envelope:
        """That of the product of a case in float64."""

    def gradient_error(self, name: str, case: Case, terms: Tensor, rounding: Rounding) -> Tensor:
        """Typical error of the gradient of ``x`` or ``weight``; `terms` is the product's."""

    def functional(self, case: Case, program: list[Any], after: list[Any]) -> Any:
        """Our functional operator's result."""

    def module(self, case: Case, program: list[Any], after: list[Any]) -> nn.Module:
        """Our module; parameters are put into ``case.tensors``."""

    def run_module(self, case: Case, module: nn.Module) -> Any:
        """The module's result."""

    def forced(self, case: Case) -> AbstractContextManager[None]:
        """Force the policy that the configuration names, if it can compute the call."""
