"""Linear with a program: the raw operator, its autograd function, and the functional API."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pycutfuse import _library, config, reference
from pycutfuse.ops import _gate, _handover, _launch, _vjp
from pycutfuse.ops._contraction import contract, is_strict
from pycutfuse.ops._memo import Memo
from pycutfuse.program import Encoded, Program, encode, operands_of

NAME = "linear"
HAND_OVER = 'precision="torch"'


def check(x: Tensor, weight: Tensor, program: Encoded, operands: Sequence[Tensor]) -> None:
    """Raise, as the plain chain, unless dtypes and shapes fit."""
    _gate.check_bias(weight, program, operands)
    _gate.check_dtypes(x, weight)
    if x.is_nested and x.layout is torch.strided:
        return  # without a shape: torch checks it
    _gate.check_linear(x, weight)
    _gate.check_operands((*x.shape[:-1], *weight.shape[:-1]), operands, "program")


def forward_by_torch(
    x: Tensor,
    weight: Tensor,
    codes: Sequence[int],
    constants: Sequence[float],
    operands: Sequence[Tensor],
    precision: str,
) -> Tensor:
    _gate.check_dtypes(x, weight)
    _gate.check_linear(x, weight)
    _gate.check_operands((*x.shape[:-1], *weight.shape[:-1]), operands, "program")
    wide = is_strict(x, precision)
    return reference.linear(x, weight, codes, constants, operands, wide=wide).contiguous()


def forward_on_cpu(
    operator: str,
    by_torch: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    planes: Tensor | None,
    words: Tensor | None,
    *rest: Any,
) -> Tensor:
    """The CPU kernel of an operator of one linear layer."""
    config.report_fallback(operator, "cpu tensors")
    return by_torch(x, weight, *rest)


def forward_on_cuda(
    operator: str,
    tail: str,
    by_torch: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    planes: Tensor | None,
    words: Tensor | None,
    codes: list[int],
    constants: list[float],
    operands: list[Tensor],
    precision: str,
) -> Tensor:
    """The CUDA kernel of an operator of one linear layer."""
    tier = config.resolve_tier(precision)
    if tier != "torch":
        program = Encoded(tuple(codes), tuple(constants))
        found = _launch.lookup(x, weight, planes, program, operands, tier, tail)
        if isinstance(found, _launch.Recipe):
            return _launch.launch(found, (x, weight, planes, *operands), words)
        _launch.report(operator, found)
    else:
        config.count_handover(operator, HAND_OVER)
    return by_torch(x, weight, codes, constants, operands, precision)


_forward_cpu = partial(forward_on_cpu, NAME, forward_by_torch)
_forward_cuda = partial(forward_on_cuda, NAME, "none", forward_by_torch)


def _forward_fake(
    x: Tensor,
    weight: Tensor,
    planes: Tensor | None,
    words: Tensor | None,
    codes: list[int],
    constants: list[float],
    operands: list[Tensor],
    precision: str,
) -> Tensor:
    _gate.check_linear(x, weight)
    out_shape = (*x.shape[:-1], *weight.shape[:-1])
    _gate.check_operands(out_shape, operands, "program")
    return x.new_empty(out_shape, dtype=_vjp.promoted(x.dtype, operands))


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    codes: list[int],
    constants: list[float],
    operands: list[Tensor],
    precision: str,
    needs: list[bool],
) -> list[Tensor]:
    with _vjp.without_autocast(x):
        value = None
        if reference.reads_value(codes, needs[2:]):
            value = contract(_vjp.as_rows(x), weight, precision).reshape(grad.shape)
        of_value, of_operands = reference.program_vjp(
            codes, constants, operands, value, grad, needs[2:]
        )
        of_value = of_value.to(x.dtype)
        of_x, of_weight = _vjp.linear_vjp(x, weight, of_value, needs[0], needs[1], precision)
        return _vjp.own_memory((of_x, of_weight, *of_operands), (grad, x, weight, *operands))


def _backward_fake(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    codes: list[int],
    constants: list[float],
    operands: list[Tensor],
    precision: str,
    needs: list[bool],
) -> list[Tensor]:
    return _vjp.fake_grads((x, weight, *operands), needs)


_forward_op = _library.define(
    "linear_fused",
    "(Tensor x, Tensor weight, Tensor? planes, Tensor? words, int[] codes, float[] constants, "
    "Tensor[] operands, str precision) -> Tensor",
    cpu=_forward_cpu,
    cuda=_forward_cuda,
    fake=_forward_fake,
)
_backward_op = _library.define_backward(
    "linear_fused_backward",
    "(Tensor grad, Tensor x, Tensor weight, int[] codes, float[] constants, Tensor[] operands, "
    "str precision, bool[] needs) -> Tensor[]",
    cpu=_backward,
    cuda=_backward,
    fake=_backward_fake,
)


class LinearFunction(torch.autograd.Function):
    """Records `linear_fused`; backward is the vjp of the reference, once differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        planes: Tensor | None,
        words: Tensor | None,
        codes: tuple[int, ...],
        constants: tuple[float, ...],
        precision: str,
        recipe: _launch.Recipe | None,
        *operands: Tensor,
    ) -> Tensor:
        needs = ctx.needs_input_grad
        reads_x = needs[1] or reference.reads_value(codes, needs[8:])
        kept, ctx.forms = _vjp.keep(operands, codes, needs[8:])
        ctx.save_for_backward(x if reads_x else _vjp.form_of(x), weight, *kept)
        ctx.settings = codes, constants, precision
        if recipe is not None:
            return _launch.launch(recipe, (x, weight, planes, *operands), words)
        out: Tensor = _forward_op(x, weight, planes, words, codes, constants, operands, precision)
        return out

    @staticmethod
    @_vjp.once_differentiable
    def backward(ctx: Any, saved: Sequence[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *rest = saved
        operands = _vjp.kept(rest, ctx.forms)
        asked = ctx.needs_input_grad
        needs = [asked[0], asked[1], *asked[8:]]
        codes, constants, precision = ctx.settings
        grads = _backward_op(grad, x, weight, codes, constants, operands, precision, needs)
        of_x, of_weight, *of_operands = _vjp.restore(grads, needs)
        return of_x, of_weight, None, None, None, None, None, None, *of_operands


class Kind(NamedTuple):
    """An operator of one linear layer: its name, its tail, and its plain chain."""

    name: str
    tail: str
    reference: Callable[..., Tensor]


_apply = _gate.plain_apply(LinearFunction)
_KIND = Kind(NAME, "none", reference.linear)


def run_decided(
    kind: Kind,
    apply: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    planes: Tensor | None,
    words: Tensor | None,
    program: Encoded,
    operands: Sequence[Tensor],
    precision: str,
    memo: Memo | None,
) -> Tensor | None:
    """The result of a plain eager call like one that was decided on before, else None.

    `apply` is that of the operator's autograd function.
    """
    if not _gate.is_plain_eager():
        return None
    tier = config.resolve_tier(precision)
    if tier == "torch":
        return None
    find = _launch.cached if memo is None else memo.find
    tensors = (x, weight, planes, *operands)
    found = find(tensors, program, tier, kind.tail)
    codes, constants = program.codes, program.constants
    if found is None:
        return None
    records = torch.is_grad_enabled() and _gate.any_requires_grad(x, weight, operands)
    if isinstance(found, _launch.Recipe):
        if records:
            head = (x, weight, planes, words, codes, constants, precision, found)
            recorded: Tensor = apply(*head, *operands)
            return recorded
        return _launch.launch(found, tensors, words)
    if not records and _handover.is_handed_over(kind.name, found, x, tier):
        value = kind.reference(x, weight, codes, constants, operands, program.biased)
        return value.contiguous()
    return None


def run(
    x: Tensor,
    weight: Tensor,
    planes: Tensor | None,
    words: Tensor | None,
    program: Encoded,
    operands: Sequence[Tensor],
    precision: str,
    memo: Memo | None = None,
) -> Tensor:
    """Run the operator, or the plain chain where the operator cannot answer."""
    given = (x, weight, planes, words, program, operands, precision, memo)
    decided = run_decided(_KIND, _apply, *given)
    if decided is not None:
        return decided
    _gate.check_tensor(x)
    if _gate.autocasts(x):
        reason = _gate.why_not_autocast(program)
        if reason is not None:
            return _by_chain(x, weight, program, operands, precision, reason)
        x, weight, operands = _gate.autocast(x, weight, program, operands)
        with torch.autocast("cuda", enabled=False):
            return run(x, weight, None, None, program, operands, precision, memo)
    _gate.check_bias(weight, program, operands)
    reason = _gate.why_reference(x, weight, operands)
    if reason is not None:
        return _by_chain(x, weight, program, operands, precision, reason)
    codes, constants = program.codes, program.constants
    out: Tensor
    if torch.is_grad_enabled() and _gate.any_requires_grad(x, weight, operands):
        function: Any = LinearFunction
        inputs = (x, weight, planes, words, codes, constants, precision, None)
        out = function.apply(*inputs, *operands)
    else:
        out = _forward_op(x, weight, planes, words, codes, constants, operands, precision)
    return out


def _by_chain(
    x: Tensor,
    weight: Tensor,
    program: Encoded,
    operands: Sequence[Tensor],
    precision: str,
    reason: str,
) -> Tensor:
    check(x, weight, program, operands)
    config.report_fallback(NAME, reason)
    codes, constants, wide = program.codes, program.constants, is_strict(x, precision)
    return reference.linear(x, weight, codes, constants, operands, program.biased, wide)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    epilogue: Program = (),
    precision: config.Precision | None = None,
) -> Tensor:
    r"""Linear with a pointwise program in its epilogue: ``program(x @ weight.T + bias)``.

    Parameters
    ----------
    x : Tensor
        ``(*, in_features)``, any strides.
    weight : Tensor
        ``(out_features, in_features)``, any strides.
    bias : Tensor, optional
        ``(out_features,)``; it counts as one step.
    epilogue : sequence of Step
        At most 16 steps, the bias included. Their operands broadcast to the output's shape and do
        not grow it.
    precision : {"ieee", "tf32", "torch"}, optional
        Tier of this call; by default that of `pycutfuse.precision`, else what torch's flags allow.
        16-bit tensors have one tier, and ``"torch"``.

    Returns
    -------
    Tensor
        ``(*, out_features)``, contiguous. CUDA tensors of float32, float16 and bfloat16 run fused,
        steps in float32 and the result rounded once. For all others, and where torch promotes the
        result of a 16-bit x (an operand of another dtype and at least 1 dimension), the plain torch
        chain runs, with torch's own result dtype. Autocast of CUDA casts x, weight and bias.

    Raises
    ------
    RuntimeError
        If shapes or dtypes do not fit, as ``torch.nn.functional.linear``.
    TypeError
        If an argument is no tensor, or a step no `Step`.
    ValueError
        If the program is too long or the precision unknown.

    Notes
    -----
    In float32 an element 2^40 times smaller than the largest of its row of x or weight contributes
    nothing. 16-bit x or weight whose rows do not lie on 16-byte boundaries, or whose K is not
    contiguous, is copied first, but for small problems. Gradients are once differentiable on the
    fused path.

    Examples
    --------
    >>> import torch, pycutfuse as pcf
    >>> x, weight = torch.ones(2, 3), torch.ones(4, 3)
    >>> pcf.ops.linear(x, weight, epilogue=(pcf.mul(2.0), pcf.relu()))
    tensor([[6., 6., 6., 6.],
            [6., 6., 6., 6.]])
    """
    return run(*prepare(x, weight, bias, epilogue=epilogue, precision=precision))


def prepare(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    epilogue: Program = (),
    precision: config.Precision | None = None,
) -> tuple[Tensor, Tensor, None, None, Encoded, list[Tensor], str]:
    """Arguments of `run` for a call of `linear`."""
    config.check_precision(precision)
    check_call(x, weight, bias)
    program = encode(epilogue, bias=bias is not None)
    operands = operands_of(epilogue)
    if bias is not None:
        operands = [bias, *operands]
    tier = precision or config.current_precision()
    return x, weight, None, None, program, operands, tier


def check_call(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise what torch raises for arguments that no path takes."""
    for name, value in (("x", x), ("weight", weight), ("bias", bias)):
        if not isinstance(value, Tensor) and not (name == "bias" and value is None):
            raise TypeError(f"linear: {name} is a {type(value).__name__}; it must be a Tensor")
    if bias is not None:
        _gate.check_dtypes(x, weight, bias)
