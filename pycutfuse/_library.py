"""Registration of raw operators with torch's dispatcher: schema, kernels, fake kernel."""

from collections.abc import Callable, Sequence
from contextlib import suppress
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
    _library.impl(name, _with_lists(cpu, schema), "CPU")
    _library.impl(name, _with_lists(cuda, schema), "CUDA")
    _torch_library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _with_lists(kernel: Callable[..., Any], schema: str) -> Callable[..., Any]:
    """`kernel` for callers that give None for an empty list, as packages of AOTInductor do."""
    given = schema[1 : schema.index(") ->")].split(", ")
    lists = [at for at, one in enumerate(given) if "[] " in one]

    def call(*arguments: Any) -> Any:
        for at in lists:
            if arguments[at] is None:
                arguments = (*arguments[:at], [], *arguments[at + 1 :])
        return kernel(*arguments)

    return call


def define_backward(name: str, schema: str, **kernels: Callable[..., Any]) -> Any:
    """`define` an operator that returns gradients, with batching rules: one call per element.

    torch.vmap of torch.autograd.grad asks for one; forwards under a transform are the plain chain.
    The other is of the older vmap, of ``torch.autograd.grad(..., is_grads_batched=True)`` and
    ``jacobian(..., vectorize=True)``, which batches the first argument alone.
    """
    made = define(name, schema, **kernels)

    def batched(info: Any, dims: Sequence[Any], *given: Any) -> tuple[list[Any], list[int]]:
        calls = [made(*_element(given, dims, at)) for at in range(info.batch_size)]
        found = [torch.stack(of_one) for of_one in zip(*calls, strict=True)]
        return found, [0] * len(found)

    untyped: Any = torch

    def older(grad: Any, *given: Any) -> list[Any]:
        level = _level_of(grad)
        calls = [made(one, *given) for one in untyped._remove_batch_dim(grad, level, -1, 0)]
        found = zip(*calls, strict=True)
        return [untyped._add_batch_dim(torch.stack(of_one), 0, level) for of_one in found]

    _torch_library.register_vmap(f"{NAMESPACE}::{name}", batched, lib=_library)
    with suppress(RuntimeError):  # a torch without the older one
        _library.impl(name, older, "Batched")
    return made


def _level_of(batched: Any) -> int:
    """The older vmap's level of a tensor: their count is a thread's, CUDA's backwards have others.

    What is not of a level is expanded there to as many as are asked for, none.
    """
    untyped: Any = torch
    most = 64  # of that vmap
    for level in range(1, most + 1):
        if untyped._remove_batch_dim(batched, level, 0, 0).shape[0] != 0:
            return level
    raise RuntimeError("gradients of a fused call are batched by their first argument alone")


def _element(given: Any, dims: Any, at: int) -> Any:
    if isinstance(given, (list, tuple)):
        return [_element(one, dim, at) for one, dim in zip(given, dims, strict=True)]
    return given if dims is None else given.select(dims, at)
