"""Steps of a module's program: their learned operands become ``epilogue.N.weight``."""

from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules import module as _hooks

from pycutfuse import reference
from pycutfuse.program import CODES, Encoded, Program, Step, describe, encode


class EpilogueStep(nn.Module):
    """One step: its operand, if any, is the parameter or buffer ``weight``."""

    weight: Tensor | None

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.op = step.op
        self.constants = step.constants
        if isinstance(step.operand, nn.Parameter):
            self.weight = step.operand
        else:
            self.register_buffer("weight", step.operand)

    def step(self) -> Step:
        """The step with its present operand."""
        return Step(self.op, self.weight, self.constants)

    def sources(self) -> list[tuple[dict[str, Any], str]]:
        """Where its operand is read, if it has one."""
        holders: tuple[dict[str, Any], ...] = (self._parameters, self._buffers, self.__dict__)
        return [(one, "weight") for one in holders if one.get("weight") is not None]

    def forward(self, value: Tensor) -> Tensor:
        """Apply the step as plain torch."""
        program = encode((self.step(),))
        operands = [] if self.weight is None else [self.weight]
        return reference.apply_program(value, program.codes, program.constants, operands)

    def extra_repr(self) -> str:
        if self.weight is not None:
            return f"{self.op}(weight of {tuple(self.weight.shape)})"
        return describe((CODES[self.op], -1), self.constants)


def has_hooks(module: nn.Module) -> bool:
    """Whether something would run or replace `module`'s forward, which a fused call skips."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def has_global_hooks() -> bool:
    """Whether hooks for all modules are registered."""
    return bool(
        _hooks._global_forward_hooks
        or _hooks._global_forward_pre_hooks
        or _hooks._global_backward_hooks
        or _hooks._global_backward_pre_hooks
    )


class Epilogue(nn.Module):
    """A module's program, in order; its steps are children ``0``, ``1``, ... and fixed."""

    def __init__(self, program: Program = ()) -> None:
        super().__init__()
        for at, step in enumerate(program):
            self.add_module(str(at), EpilogueStep(step))

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[EpilogueStep]:
        return iter(cast("Iterable[EpilogueStep]", self._modules.values()))

    def forward(self, value: Tensor) -> Tensor:
        """Apply the program as plain torch."""
        for step in self:
            value = step(value)
        return value

    def why_chain(self) -> str | None:
        """Say why the steps must run one after the other, or None."""
        if has_hooks(self):
            return "hooks on the epilogue"
        for step in self:
            if type(step) is not EpilogueStep:
                return "a step of another type, or with a parametrization"
            if has_hooks(step):
                return "hooks on a step"
        return "global module hooks" if self._modules and has_global_hooks() else None

    def operands(self) -> list[Tensor]:
        """Operands in the order in which `encode` numbers them; `why_chain` is None."""
        found: list[Tensor] = []
        for step in self:  # dictionaries, as attributes of a module cost seven times more
            weight: Tensor | None = step._parameters.get("weight")
            if weight is None and "weight" in step._buffers:
                weight = step._buffers["weight"]
            elif weight is None:  # FSDP and DataParallel make a parameter a plain attribute
                weight = step.weight
            if weight is not None:
                found.append(weight)
        return found

    def encoded(self, *, bias: bool) -> Encoded:
        """The program without its operands."""
        return encode([step.step() for step in self], bias=bias)


def hold(layer: nn.Module, program: Program) -> None:
    """Set a layer's ``epilogue``.

    Without steps it is no child, as torch's layer has none: tensor parallelism shards all it finds.
    """
    made = Epilogue(program)
    if len(made) > 0:
        layer.epilogue = made
    else:
        layer.__dict__["epilogue"] = made
