"""Registration of raw operators with torch's dispatcher: schema, kernels, fake kernel."""

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "pycutfuse"
_torch_library: Any = torch.library  # untyped
_library = _torch_library.Library(NAMESPACE, "DEF")


def define(
    name: str,
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
) -> Any:
    """Define ``pycutfuse::name``, opaque to Dynamo, and return its one overload.

    No autograd kernel is registered: the functional layer wraps the operator in an
    ``autograd.Function``, which costs a fifth of ``register_autograd`` and may mutate buffers.
    """
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, cpu, "CPU")
    _library.impl(name, cuda, "CUDA")
    _torch_library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
