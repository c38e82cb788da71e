"""Programs: tuples of frozen pointwise steps, and their form at the dispatcher's border."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real

from torch import Tensor

# include/cutfuse/program.h, enum class Op. The numbers are part of the binary interface.
OPS: dict[str, int] = {
    name: code
    for code, name in enumerate(
        (
            "add",
            "sub",
            "mul",
            "div",
            "minimum",
            "maximum",
            "relu",
            "leaky_relu",
            "sigmoid",
            "tanh",
            "gelu_erf",
            "gelu_tanh",
            "silu",
            "mish",
            "hardswish",
            "clamp",
            "softplus",
        )
    )
}
MAX_STEPS = 16
# A code's low byte is the library's op; what is above it tells apart functions of equal values and
# other gradients, which the library does not compute.
_OP_BITS = 0xFF
CODES: dict[str, int] = OPS | {"hardtanh": OPS["clamp"] | 1 << 8}
NAMES: dict[int, str] = {code: name for name, code in CODES.items()}


@dataclass(frozen=True, eq=False)
class Step:
    """One pointwise function of a program; made by `add`, `relu`, ... and never changed.

    Attributes
    ----------
    op : str
        Name of the function, a key of ``CODES``.
    operand : Tensor or None
        Second operand, broadcastable to the output. A 0-dim tensor is an operand, not a constant.
    constants : tuple of float
        Up to two constants; zero where unused.
    """

    op: str
    operand: Tensor | None = None
    constants: tuple[float, float] = (0.0, 0.0)


Program = Sequence[Step]


@dataclass(frozen=True)
class Encoded:
    """A program without its operands: codes [op, operand or -1] * n, constants [a, b] * n."""

    codes: tuple[int, ...] = ()
    constants: tuple[float, ...] = ()
    biased: bool = field(default=False, compare=False)  # the first step is linear's own bias

    @cached_property
    def key(self) -> tuple[tuple[int, ...], bytes]:
        """For caches. Bytes, as 0.0 == -0.0 and NaN != NaN would mistake one for another."""
        return self.codes, array("d", self.constants).tobytes()


EMPTY = Encoded()


def _number(step: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{step}: {name} is a {type(value).__name__}; it must be a real number")
    return float(value)


def _binary(op: str, other: object) -> Step:
    if isinstance(other, Tensor):
        return Step(op, other)
    return Step(op, None, (_number(op, "other", other), 0.0))


def _bound(op: str, other: object) -> Step:
    if isinstance(other, Tensor):
        raise TypeError(f"{op}: other is a Tensor; it must be a real number in a program")
    bound = _number(op, "other", other)
    if bound != bound:
        raise ValueError(f"{op}: the bound is NaN; it must be a number, or infinite for no bound")
    return Step(op, None, (bound, 0.0))


def _bounds(op: str, low: float, high: float) -> tuple[float, float]:
    if low != low or high != high:
        raise ValueError(f"{op}: a bound is NaN ({low} and {high}); bounds must be numbers")
    return low, high


def add(other: float | Tensor) -> Step:
    """v + other. `other` is a number, or a tensor broadcastable to the output.

    Examples
    --------
    >>> import pycutfuse as pcf
    >>> pcf.add(2)
    Step(op='add', operand=None, constants=(2.0, 0.0))
    """
    return _binary("add", other)


def sub(other: float | Tensor) -> Step:
    """v - other. `other` as for `add`."""
    return _binary("sub", other)


def mul(other: float | Tensor) -> Step:
    """v * other. `other` as for `add`."""
    return _binary("mul", other)


def div(other: float | Tensor) -> Step:
    """v / other, rounded as IEEE says. `other` as for `add`."""
    return _binary("div", other)


def minimum(other: float) -> Step:
    """min(v, other), as ``torch.clamp(v, max=other)``: a NaN stays. ValueError if other is NaN."""
    return _bound("minimum", other)


def maximum(other: float) -> Step:
    """max(v, other), as ``torch.clamp(v, min=other)``: a NaN stays. ValueError if other is NaN."""
    return _bound("maximum", other)


def relu() -> Step:
    """max(v, 0)."""
    return Step("relu")


def leaky_relu(negative_slope: float = 0.01) -> Step:
    """v > 0 ? v : negative_slope * v."""
    return Step("leaky_relu", None, (_number("leaky_relu", "negative_slope", negative_slope), 0.0))


def sigmoid() -> Step:
    """1 / (1 + exp(-v))."""
    return Step("sigmoid")


def tanh() -> Step:
    """tanh(v)."""
    return Step("tanh")


def gelu(*, approximate: str = "none") -> Step:
    """v / 2 * (1 + erf(v / sqrt 2)), or with ``approximate="tanh"`` torch's tanh form.

    Raises
    ------
    RuntimeError
        If `approximate` is neither ``"none"`` nor ``"tanh"``, as torch.

    Examples
    --------
    >>> import pycutfuse as pcf
    >>> pcf.gelu(approximate="tanh").op
    'gelu_tanh'
    """
    if approximate not in ("none", "tanh"):
        raise RuntimeError(f"gelu: approximate is {approximate!r}; it must be 'none' or 'tanh'")
    return Step("gelu_tanh" if approximate == "tanh" else "gelu_erf")


def silu() -> Step:
    """v / (1 + exp(-v))."""
    return Step("silu")


def mish() -> Step:
    """v * tanh(log(1 + exp(v)))."""
    return Step("mish")


def hardswish() -> Step:
    """v * min(max(v + 3, 0), 6) / 6."""
    return Step("hardswish")


def clamp(min: float | None = None, max: float | None = None) -> Step:
    """min(max(v, min), max); a bound that is None does not bound, a NaN stays.

    The gradient at a bound is torch.clamp's: passed on up to torch 2.13, 0 from 2.14 on.

    Raises
    ------
    RuntimeError
        If both bounds are None, as torch.
    ValueError
        If a bound is NaN.
    """
    if min is None and max is None:
        raise RuntimeError("clamp: min and max are both None; give at least one of them")
    low = float("-inf") if min is None else _number("clamp", "min", min)
    high = float("inf") if max is None else _number("clamp", "max", max)
    bounds = _bounds("clamp", low, high)
    if min is None:  # torch tells one bound from two: their gradients at infinity differ
        return Step("minimum", None, (high, 0.0))
    if max is None:
        return Step("maximum", None, (low, 0.0))
    return Step("clamp", None, bounds)


def hardtanh(min_val: float = -1.0, max_val: float = 1.0) -> Step:
    """min(max(v, min_val), max_val). As in torch its gradient is 0 at the bounds.

    Raises
    ------
    ValueError
        If ``min_val > max_val``, or a bound is NaN.
    """
    low = _number("hardtanh", "min_val", min_val)
    high = _number("hardtanh", "max_val", max_val)
    if low > high:
        raise ValueError(f"hardtanh: min_val {min_val} is greater than max_val {max_val}")
    return Step("hardtanh", None, _bounds("hardtanh", low, high))


def softplus(beta: float = 1.0, threshold: float = 20.0) -> Step:
    """beta * v > threshold ? v : log(1 + exp(beta * v)) / beta."""
    constants = (_number("softplus", "beta", beta), _number("softplus", "threshold", threshold))
    return Step("softplus", None, constants)


def check_program(program: Program, *, bias: bool | None = False) -> None:
    """Raise unless `program` is a sequence of at most 16 steps, the bias counted as one.

    Raises
    ------
    TypeError
        If it is no sequence of `Step`.
    ValueError
        If it is too long.
    """
    if not isinstance(program, tuple | list | Sequence):  # the ABC last, as it costs most
        raise TypeError(
            f"a program is a {type(program).__name__}; it must be a sequence of steps, such as "
            "(pycutfuse.relu(),)"
        )
    for at, step in enumerate(program):
        if not isinstance(step, Step):
            ours = callable(step) and step.__module__ == __name__
            hint = f"; call it: {step.__name__}()" if ours else ""
            raise TypeError(
                f"step {at} of a program is a {type(step).__name__}; steps are made by "
                f"pycutfuse.add, pycutfuse.relu, ...{hint}"
            )
    if len(program) + bool(bias) > MAX_STEPS:
        counted = " and the bias" if bias else ""
        raise ValueError(
            f"a program has at most {MAX_STEPS} steps but this one has {len(program)}{counted}; "
            "apply the rest with torch after the operator"
        )


_BIAS_CODES = (OPS["add"], 0)
_NO_CONSTANTS = (0.0, 0.0)


def encode(program: Program, *, bias: bool = False) -> Encoded:
    """Encode `program`, operands numbered in order; with `bias`, operand 0 is added first."""
    check_program(program, bias=bias)
    codes: tuple[int, ...] = _BIAS_CODES if bias else ()
    constants: tuple[float, ...] = _NO_CONSTANTS if bias else ()
    operand = int(bias)
    for step in program:
        if step.operand is None:
            codes += (CODES[step.op], -1)
        else:
            codes += (CODES[step.op], operand)
            operand += 1
        constants += step.constants
    return Encoded(codes, constants, bias)


def library_codes(codes: Sequence[int]) -> tuple[int, ...]:
    """Codes of the library's own ops, in `Encoded.codes`."""
    return tuple(code if at % 2 else code & _OP_BITS for at, code in enumerate(codes))


def operands_of(program: Program) -> list[Tensor]:
    """Operands of `program`, in the order in which `encode` numbers them."""
    return [step.operand for step in program if step.operand is not None]


_CONSTANTS = dict.fromkeys([*list(OPS)[:6], "leaky_relu"], 1) | dict.fromkeys(
    ("clamp", "hardtanh", "softplus"), 2
)


def describe(codes: Sequence[int], constants: Sequence[float]) -> str:
    """One line in the words of libcutfuse, for example ``add(operand 0) | mul(2) | sigmoid``."""
    steps = []
    for at in range(0, len(codes), 2):
        name, operand = NAMES[codes[at]], codes[at + 1]
        count = _CONSTANTS.get(name, 0)
        values = ", ".join(f"{value:g}" for value in constants[at : at + count])
        argument = f"operand {operand}" if operand >= 0 else values
        steps.append(f"{name}({argument})" if argument else name)
    return " | ".join(steps) or "identity"
