"""Linear -> program -> logsumexp over the features."""

import torch
from torch import Tensor, nn

from pycutfuse.nn._epilogue import Epilogue
from pycutfuse.nn.linear import Linear
from pycutfuse.ops._linear_logsumexp import NAME, run


class LinearLogSumExp(Linear):
    r"""``logsumexp(program(x @ weight.T + bias), dim=-1)``; the logits are never stored.

    Parameters
    ----------
    in_features, out_features : int
        Sizes of the linear layer; `out_features` are reduced.
    bias, device, dtype
        As in `Linear`.
    epilogue : sequence of Step
        Steps between the linear layer and the reduction, as in `Linear`.
    precision : {"ieee", "tf32", "torch"}, optional
        Tier of this module; None follows `pycutfuse.precision` and torch's flags.

    Attributes
    ----------
    weight, bias
        As in `Linear`.

    Raises
    ------
    TypeError, ValueError
        For a malformed program or an unknown precision.

    Notes
    -----
    Input ``(*, in_features)``, output ``(*)``; 1-D to N-D. Gradients are once differentiable on the
    fused path; backward contracts the logits again.

    Examples
    --------
    >>> import torch, pycutfuse as pcf
    >>> layer = pcf.nn.LinearLogSumExp(3, 4)
    >>> layer(torch.randn(2, 3)).shape
    torch.Size([2])
    >>> list(layer.state_dict())
    ['weight', 'bias']
    """

    _name = NAME
    _run = staticmethod(run)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``logsumexp(program(input @ weight.T + bias), dim=-1)``, ``(*)``.

        `input`, and what is raised, are as in `Linear`.
        """
        return super().forward(input)

    def _plain(self, x: Tensor) -> Tensor:
        return torch.logsumexp(super()._plain(x), -1)

    def to_torch(self) -> nn.Module:
        """Make the plain torch chain that shares this module's parameters, under the same keys."""
        return _Chain(self.weight, self.bias, self.epilogue).train(self.training)


class _Chain(nn.Linear):
    """The chain as a user of torch writes it."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, epilogue: Epilogue) -> None:
        out_features, in_features = weight.shape
        super().__init__(in_features, out_features, bias is not None, device="meta")
        self.weight = weight
        self.bias = bias  # type: ignore[assignment]
        self.epilogue = epilogue

    def forward(self, x: Tensor) -> Tensor:
        return torch.logsumexp(self.epilogue(super().forward(x)), -1)
