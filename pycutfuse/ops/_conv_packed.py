"""Weights of frozen convolutions: a snapshot, and the packed forms in which plans read it.

How a weight is packed depends on the input's size, which `pycutfuse.freeze` does not know, so that
each form is made at the first call that needs it. A compiled graph hands only tensors to an
operator: it finds the forms by the snapshot's address.
"""

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pycutfuse import support
from pycutfuse._loader import native
from pycutfuse.ops._frozen import raw_stream

if TYPE_CHECKING:
    from pycutfuse._C import ConvPlan

# Of one module. Further sizes read the snapshot as it is: a captured graph may hold the address of
# any of these, so that none is dropped for another.
MAX_FORMS = 8


@dataclass
class _Written:
    memory: Tensor
    stream: int  # raw handle of the stream that wrote it
    event: Any  # torch.cuda.Event, untyped; None once it is known to be complete


@dataclass(eq=False)
class Frozen:
    """A snapshot and its forms by ``ConvPlan.packed_key``. They live as long as the module."""

    source: _Written
    forms: dict[str, _Written] = field(default_factory=dict)

    @property
    def snapshot(self) -> Tensor:
        """The weight as it was."""
        return self.source.memory


_by_address: WeakValueDictionary[int, Frozen] = WeakValueDictionary()
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


def _written(memory: Tensor, index: int, stream: int) -> _Written:
    return _Written(memory, stream, torch.cuda.current_stream(index).record_event())


def freeze(weight: Tensor) -> Frozen:
    """Copy `weight` on the current stream; `why_not_frozen` has accepted it."""
    index = weight.get_device()
    made = Frozen(_written(weight.detach().clone(), index, raw_stream(index)))
    with _lock:
        _by_address[made.snapshot.data_ptr()] = made
    return made


def use(snapshot: Tensor, plan: "ConvPlan | None", index: int, stream: int) -> Tensor | None:
    """`snapshot` as `plan` reads it packed; None if it must be read as it is.

    What is read is ordered before work of `stream`, the current one of device `index`. The caller
    keeps it until that is queued: another thread may unfreeze the module. No form is made while a
    CUDA graph is captured: the graph would own the memory.
    """
    frozen = _by_address.get(snapshot.data_ptr())
    if frozen is None:
        return None
    form = None if plan is None else frozen.forms.get(plan.packed_key)
    if form is None and plan is not None and len(frozen.forms) < MAX_FORMS:
        form = _new_form(frozen, plan, index, stream)
    read = frozen.source if form is None else form
    if read.stream != stream:
        _order(read, index)
    return None if form is None else form.memory


def _new_form(frozen: Frozen, plan: "ConvPlan", index: int, stream: int) -> _Written | None:
    if torch.cuda.is_current_stream_capturing():
        return None
    with _lock:
        form = frozen.forms.get(plan.packed_key)
        if form is None:
            if frozen.source.stream != stream:
                _order(frozen.source, index)
            weight, pack = frozen.snapshot, native().binding.pack_conv_weight
            memory = torch.empty(plan.packed_bytes, dtype=torch.uint8, device=weight.device)
            pack(plan, weight.data_ptr(), weight.stride(), memory.data_ptr(), stream)
            form = frozen.forms[plan.packed_key] = _written(memory, index, stream)
    return form


def _order(written: _Written, index: int) -> None:
    """Let the current stream wait for what another one wrote, and keep it alive for it."""
    current = torch.cuda.current_stream(index)
    written.memory.record_stream(current)
    event = written.event
    if event is None or torch.cuda.is_current_stream_capturing():
        # A captured stream must not wait for work outside its capture, and need not:
        # torch.cuda.graph synchronises before it begins.
        return
    if event.query():
        written.event = None
    else:
        current.wait_event(event)
