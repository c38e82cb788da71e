"""Every step, and chains of them, beside what a user of torch would write."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse.program import Step


@dataclass(frozen=True)
class ProgramCase:
    """A program made from its operands, and the same as a plain function."""

    name: str
    build: Callable[[list[Tensor]], tuple[Step, ...]]
    plain: Callable[[Tensor, list[Tensor]], Tensor]
    shapes: tuple[str, ...] = ()  # of the operands: "n" vector, "m" column, "mn" full, "0" scalar

    def operands(self, m: int, n: int, *, seed: int = 5, device: str = "cpu") -> list[Tensor]:
        sizes = {"n": (n,), "m": (m, 1), "mn": (m, n), "0": ()}
        generator = torch.Generator().manual_seed(seed)
        # Away from zero, as one of them may divide.
        return [
            (torch.rand(sizes[shape], generator=generator) + 0.5).to(device)
            for shape in self.shapes
        ]

    def __str__(self) -> str:
        return self.name


def _unary(name: str, step: Step, plain: Callable[[Tensor], Tensor]) -> ProgramCase:
    return ProgramCase(name, lambda _: (step,), lambda v, _: plain(v))


STEPS = [
    _unary("add", pcf.add(1.5), lambda v: v + 1.5),
    _unary("sub", pcf.sub(0.1), lambda v: v - 0.1),
    _unary("mul", pcf.mul(-2.0), lambda v: v * -2.0),
    _unary("div", pcf.div(4.0), lambda v: v / 4.0),
    _unary("minimum", pcf.minimum(0.25), lambda v: torch.minimum(v, v.new_tensor(0.25))),
    _unary("maximum", pcf.maximum(-0.25), lambda v: torch.maximum(v, v.new_tensor(-0.25))),
    _unary("relu", pcf.relu(), torch.relu),
    _unary("leaky_relu", pcf.leaky_relu(0.2), lambda v: F.leaky_relu(v, 0.2)),
    _unary("sigmoid", pcf.sigmoid(), torch.sigmoid),
    _unary("tanh", pcf.tanh(), torch.tanh),
    _unary("gelu", pcf.gelu(), F.gelu),
    _unary("gelu_tanh", pcf.gelu(approximate="tanh"), lambda v: F.gelu(v, approximate="tanh")),
    _unary("silu", pcf.silu(), F.silu),
    _unary("mish", pcf.mish(), F.mish),
    _unary("hardswish", pcf.hardswish(), F.hardswish),
    _unary("hardtanh", pcf.hardtanh(), F.hardtanh),
    _unary("clamp", pcf.clamp(max=0.5), lambda v: v.clamp(max=0.5)),
    _unary("softplus", pcf.softplus(2.0, 3.0), lambda v: F.softplus(v, 2.0, 3.0)),
    ProgramCase("mul_vector", lambda o: (pcf.mul(o[0]),), lambda v, o: v * o[0], ("n",)),
    ProgramCase("div_column", lambda o: (pcf.div(o[0]),), lambda v, o: v / o[0], ("m",)),
    ProgramCase("add_full", lambda o: (pcf.add(o[0]),), lambda v, o: v + o[0], ("mn",)),
    ProgramCase("sub_scalar", lambda o: (pcf.sub(o[0]),), lambda v, o: v - o[0], ("0",)),
]

CHAINS = [
    ProgramCase("identity", lambda _: (), lambda v, _: v),
    ProgramCase(
        "scale_gelu_residual",
        lambda o: (pcf.mul(o[0]), pcf.gelu(approximate="tanh"), pcf.add(o[1])),
        lambda v, o: F.gelu(v * o[0], approximate="tanh") + o[1],
        ("n", "mn"),
    ),
    ProgramCase(
        "four",
        lambda o: (pcf.mul(o[0]), pcf.sigmoid(), pcf.mul(2.0), pcf.sub(o[1])),
        lambda v, o: torch.sigmoid(v * o[0]) * 2.0 - o[1],
        ("n", "m"),
    ),
    ProgramCase(
        "fifteen",
        lambda o: (pcf.mul(o[0]), pcf.add(0.5), pcf.tanh()) * 5,
        lambda v, o: _repeat(v, o[0]),
        ("n",) * 5,
    ),
]


def _repeat(value: Tensor, factor: Tensor) -> Tensor:
    for _ in range(5):
        value = torch.tanh(value * factor + 0.5)
    return value


PROGRAMS = STEPS + CHAINS
