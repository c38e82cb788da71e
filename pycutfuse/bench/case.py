"""What a benchmark case is: one chain, programs of several lengths, random sizes, policies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from pycutfuse.bench.floors import Work
from pycutfuse.bench.shapes import ConvShape, Shape

AnyShape = Shape | ConvShape


@dataclass(frozen=True)
class Case:
    """One benchmark case.

    Attributes
    ----------
    name : str
        Family, shape and mode; what ``--case`` matches.
    shape : Shape or ConvShape
    training : bool
        Mode of both modules.
    chain : str
        What is computed, in words, for the report.
    reference : callable
        ``reference(shape)`` is the PyTorch chain of any shape of this kind, on the default device.
    fused : callable
        ``fused(reference)`` is its replacement, with equal parameters, buffers and mode.
    reduces_rows : bool
        The result has one element for each row.
    """

    name: str
    shape: AnyShape
    training: bool
    chain: str
    reference: Callable[[Any], nn.Module]
    fused: Callable[[nn.Module], nn.Module]
    reduces_rows: bool = False

    @property
    def can_freeze(self) -> bool:
        """Frozen weights are for inference only."""
        return not self.training

    @property
    def memory_slack(self) -> float:
        """Our peak over eager's that is allowed.

        For convolutions as much as eager's; 1 % is for the packed weight, as PyTorch may need no
        workspace at all.
        """
        return 1.01 if isinstance(self.shape, ConvShape) else 1.1

    def reduced(self) -> Case:
        """This case at the size for the CPU."""
        return replace(self, shape=self.shape.reduced())

    def work(self, parameter_bytes: int, itemsize: int) -> Work:
        """Bytes and operations of one call: input, parameters and result are moved once."""
        size = self.shape.input_size
        outputs = size[0] if self.reduces_rows else math.prod(self.shape.output_size)
        moved = (math.prod(size) + outputs) * itemsize + parameter_bytes
        return Work(bytes=moved, flop=self.shape.flop)


@dataclass(frozen=True)
class ExecutorCase:
    """What the interpreted program costs: a bias alone beside longer programs, same shape."""

    name: str
    shape: Shape
    programs: tuple[Case, ...]

    def reduced(self) -> ExecutorCase:
        """This case at the size for the CPU."""
        programs = tuple(case.reduced() for case in self.programs)
        return replace(self, shape=self.shape.reduced(), programs=programs)


@dataclass(frozen=True)
class SizesCase:
    """`count` problems of a family: random ones, or a network's.

    Attributes
    ----------
    largest : int
        ``"linear"``: of M, N and K, each log-uniform from 1. ``"conv2d"``: elements of the input,
        and of the result, as of ``"conv_breadth"``. ``"resnet50"``: images.
    compiled : int
        How many of them are also compared with torch.compile max-autotune.
    """

    name: str
    count: int
    largest: int
    compiled: int
    seed: int = 0
    family: Literal["linear", "conv2d", "conv_breadth", "resnet50"] = "linear"
    channels_last: bool = False

    def reduced(self) -> SizesCase:
        """This case at the size for the CPU."""
        count, largest = {
            "linear": (10, 256),
            "conv2d": (10, 2**15),
            "conv_breadth": (10, 2**15),
            "resnet50": (4, 1),
        }[self.family]
        return replace(self, count=count, largest=largest)

    def quick(self) -> SizesCase:
        """Fewer sizes, for a first look."""
        return replace(self, count=max(1, self.count // 5))


@dataclass(frozen=True)
class ForcedCase:
    """Every compiled ieee policy of an architecture, forced in turn on a linear layer."""

    name: str
    shape: Shape
    arch: int

    def reduced(self) -> ForcedCase:
        """This case at the size for the CPU."""
        return replace(self, shape=self.shape.reduced())


AnyCase = Case | ExecutorCase | SizesCase | ForcedCase


def like(reference: nn.Module, fused: nn.Module) -> nn.Module:
    """`fused` with the device, dtype, parameters, buffers and mode of `reference`."""
    parameter = next(reference.parameters())
    fused.to(parameter.device, parameter.dtype).load_state_dict(reference.state_dict())
    return fused.train(reference.training)
