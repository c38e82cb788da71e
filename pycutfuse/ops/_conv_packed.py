"""Weights of frozen convolutions in the forms that plans read, made at first use of each plan.

How a weight is packed depends on the input's size, which `pycutfuse.freeze` does not know. A module
therefore registers a small marker as its buffer: a compiled graph hands only tensors to an
operator, and the operator finds the forms by the marker's address.
"""

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pycutfuse import support
from pycutfuse._loader import native

if TYPE_CHECKING:
    from pycutfuse._C import ConvPlan

# Of one module. Further sizes read the weight as it is: a captured graph may hold the address of
# any of these, so that none is dropped for another.
MAX_FORMS = 8


@dataclass
class _Form:
    memory: Tensor
    stream: int  # raw handle of the stream that wrote it
    event: Any  # torch.cuda.Event, untyped; None once the form is known to be complete


@dataclass(eq=False)
class Packed:
    """Forms of one frozen weight, by ``ConvPlan.packed_key``. They live as long as the module."""

    marker: Tensor
    forms: dict[str, _Form] = field(default_factory=dict)


_by_address: WeakValueDictionary[int, Packed] = WeakValueDictionary()
_lock = threading.Lock()


def why_not_frozen(weight: Tensor) -> str | None:
    """Say why no plan reads a packed form of `weight`, or None."""
    if not weight.is_cuda:
        return f"{weight.device.type} tensors"
    if weight.dtype not in support.DTYPES:
        return f"dtype {weight.dtype}".replace("torch.", "")
    if type(weight) not in (Tensor, torch.nn.Parameter) or weight.dim() != 4:
        return f"weight is a {type(weight).__name__} of {weight.dim()} dimensions"
    return support.device_problem(weight.get_device()) or support.conv_missing()


def freeze(weight: Tensor) -> Packed:
    """Start with no forms of `weight`."""
    packed = Packed(torch.empty(16, dtype=torch.uint8, device=weight.device))
    with _lock:
        _by_address[packed.marker.data_ptr()] = packed
    return packed


def _make(plan: "ConvPlan", weight: Tensor, index: int, stream: int) -> _Form:
    memory = torch.empty(plan.packed_bytes, dtype=torch.uint8, device=weight.device)
    binding = native().binding
    binding.pack_conv_weight(plan, weight.data_ptr(), weight.stride(), memory.data_ptr(), stream)
    return _Form(memory, stream, torch.cuda.current_stream(index).record_event())


def form_of(marker: Tensor, plan: "ConvPlan", weight: Tensor, index: int, stream: int) -> int:
    """Address of `weight` as `plan` reads it, ordered before work of `stream`; 0 if there is none.

    None is made while a CUDA graph is captured: the graph would own the memory.
    """
    packed = _by_address.get(marker.data_ptr())
    if packed is None:
        return 0
    form = packed.forms.get(plan.packed_key)
    if form is None:
        if len(packed.forms) >= MAX_FORMS or torch.cuda.is_current_stream_capturing():
            return 0
        with _lock:
            form = packed.forms.get(plan.packed_key)
            if form is None:
                form = packed.forms[plan.packed_key] = _make(plan, weight, index, stream)
    if form.stream != stream:
        _order(form, index)
    return form.memory.data_ptr()


def _order(form: _Form, index: int) -> None:
    current = torch.cuda.current_stream(index)
    form.memory.record_stream(current)
    event = form.event
    if event is None or torch.cuda.is_current_stream_capturing():
        # A captured stream must not wait for work outside its capture, and need not:
        # torch.cuda.graph synchronises before it begins.
        return
    if event.query():
        form.event = None
    else:
        current.wait_event(event)
