"""freeze and unfreeze."""

from torch import nn

from pycutfuse.nn import _base


def freeze(module: nn.Module) -> nn.Module:
    """Split the weights of all pycutfuse modules in `module` once, for all forwards to come.

    Otherwise the weights are split at every call, because nothing tells reliably that they changed,
    or of a small product read as they are, whose last bits may differ from those of the planes.
    The planes are made for the tier in force now: the module's own, else that of
    `pycutfuse.precision`, else what torch's flags say. Those of ``"ieee"`` serve ``"tf32"`` calls
    too; those of ``"tf32"`` are half as large, and an ``"ieee"`` call splits the weight again.
    A convolution's weight is copied now and packed at the first call that needs a form of it: a
    call that is captured in a CUDA graph before that reads the copy as it is.
    All of it is made on the current stream and may be used on every other. While a module is
    frozen, changes of its weight are not seen, except through what unfreezes it:
    ``load_state_dict``, ``.to()`` and its relatives, ``.train()``, and `unfreeze`. (Calls that need
    nothing of what was made, of at most 16 rows or of fewer than 64 features, and those that are
    handed over to PyTorch, read the weight itself.) A call with
    another weight, of ``torch.func.functional_call``, a parametrization or an assignment, uses it.
    A CUDA graph that was captured of a frozen module reads what was made then, so that it must not
    be replayed once the module is unfrozen. A program that was exported of one holds it for ever:
    weights that are loaded into the program are not seen.

    Parameters
    ----------
    module : torch.nn.Module
        In evaluation mode. float16 and bfloat16 weights of linear layers are multiplied as they
        are: there is nothing to keep. Modules whose weights no kernel takes (CPU, float64) stay
        as they are and follow the fallback policy.

    Returns
    -------
    torch.nn.Module
        `module` itself.

    Raises
    ------
    RuntimeError
        If a module is in training mode, or a CUDA graph is being captured.
    ValueError
        If there is no pycutfuse module in `module`.
    TypeError
        If `module` is no module.

    Examples
    --------
    >>> import pycutfuse as pcf
    >>> layer = pcf.freeze(pcf.nn.Linear(3, 4).eval())
    >>> layer.frozen  # on the CPU there is nothing to freeze
    False
    """
    _base.freeze(module)
    return module


def unfreeze(module: nn.Module) -> nn.Module:
    """Drop what `freeze` made.

    Returns
    -------
    torch.nn.Module
        `module` itself.

    Examples
    --------
    >>> import pycutfuse as pcf
    >>> pcf.unfreeze(pcf.nn.Linear(3, 4)).frozen
    False
    """
    _base.unfreeze(module)
    return module
