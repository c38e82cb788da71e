"""Invalid calls of the convolution family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from pycutfuse import nn as modules
from pycutfuse import ops
from pycutfuse.testing.repro import mistakes
from pycutfuse.testing.repro.case import Case
from pycutfuse.testing.repro.config import Config
from pycutfuse.testing.repro.conv import ConvConfig
from pycutfuse.testing.repro.mistakes import Mistake, attribute, of_tensor, too_many
from pycutfuse.testing.repro.tails import BatchNorm

# Those that say the same of any contraction.
_SHARED = (
    *("x_scalar", "x_list", "x_none", "x_on_cpu", "weight_none", "bias_size", "bias_number"),
    *("operand_size", "operand_grows", "step_word", "step_function", "constant_word"),
    *("constant_bool", "bound_nan", "gelu_mode", "clamp_nothing", "hardtanh_order", "precision"),
    *("freeze_training", "no_statistics", "running_size", "bn_weight_size", "momentum_word"),
    *("momentum_negative", "eps_word", "eps_none"),
)
# Of dtypes that differ, which torch does not notice where there is no image.
_MIXED = ("x_integer", "x_complex", "x_double", "x_half", "bias_dtype")


def _setting(name: str, value: Any) -> Callable[[Case], None]:
    """Another setting than the configuration's; a function of it if `value` is one."""

    def make(case: Case) -> None:
        case.settings[name] = value(case.config) if callable(value) else value

    return make


def _functional(config: Config) -> bool:
    return config.call == "ops"


def _of(config: Config) -> ConvConfig:
    assert isinstance(config, ConvConfig)
    return config


def _plain(config: Config) -> bool:
    return config.tail is None and _functional(config)


def _transposed(config: Config) -> bool:
    return _of(config).transposed and _functional(config)


def _not_transposed(config: Config) -> bool:
    return not _of(config).transposed and _functional(config)


def _numbered(config: Config) -> bool:
    """Whether the padding is numbers, so that no other setting is refused for its sake."""
    return _functional(config) and not isinstance(_of(config).padding, str)


def _bare_module(config: Config) -> bool:
    return config.tail is None and config.call == "module"


def _one_value(case: Case) -> None:
    """An image of which the filter makes one pixel."""
    config, x = _of(case.config), case.tensors["x"]
    sizes = zip(config.taps.dilation, config.kernel, strict=True)
    case.tensors["x"] = x.new_ones(1, x.shape[1], *(d * (k - 1) + 1 for d, k in sizes))


def _operand_shapes(config: Config) -> list[tuple[int, ...]]:
    return [step.operand.shape for step in (*config.program, *config.after) if step.operand]


def _has_batched_operands(config: Config) -> bool:
    return any(len(shape) > 3 for shape in _operand_shapes(config))


def _may_be_one_value(config: Config) -> bool:
    of_channels = all(shape[-2:] in ((), (1, 1)) for shape in _operand_shapes(config))
    bare = _of(config).padding in (0, (0, 0), "valid")
    return (
        mistakes.is_training(config) and bare and of_channels and not _has_batched_operands(config)
    )


def _too_small(case: Case) -> None:
    """An image that is lower than the filter, or has no row at all."""
    config, x = _of(case.config), case.tensors["x"]
    least = 1 if config.transposed else config.taps.dilation[0] * (config.kernel[0] - 1) + 1
    case.tensors["x"] = x.new_ones(*x.shape[:-2], least - 1, x.shape[-1])


def _may_be_too_small(config: Config) -> bool:
    return _of(config).padding in (0, (0, 0)) and _of(config).kernel[0] > 1


def _channels(change: Callable[[int], int]) -> Callable[[Case], None]:
    def make(case: Case) -> None:
        x = case.tensors["x"]
        wanted = change(x.shape[-3])
        case.tensors["x"] = x.new_ones(*x.shape[:-3], wanted, *x.shape[-2:])

    return make


def _modules(ours: Callable[[Any], Any]) -> Callable[[Case], None]:
    """Constructors with nonsense, of our modules and of torch's."""
    return attribute("instead", (lambda case: ours(modules), lambda case: ours(nn)))


def _output_size(case: Case) -> None:
    """An output size out of reach."""
    config = _of(case.config)
    rows, columns = config.size
    size = [rows + 100, columns]

    def call(case: Case, namespace: Any) -> Any:
        layer = namespace.ConvTranspose2d(config.x.shape[-3], config.n, config.kernel)
        return layer(case.tensors["x"].float(), size)

    case.instead = (lambda c: call(c, modules), lambda c: call(c, nn))


def _reflected(case: Case) -> None:
    """More padding by reflection than there are pixels."""
    channels, height, width = case.tensors["x"].shape[-3:]
    padding = (0, max(height, width))

    def call(case: Case, namespace: Any) -> Any:
        layer = namespace.Conv2d(channels, 4, 1, padding=padding, padding_mode="reflect")
        return layer(case.tensors["x"].float())

    case.instead = (lambda c: call(c, modules), lambda c: call(c, nn))


MISTAKES: dict[str, Mistake] = {
    **{name: mistakes.MISTAKES[name] for name in _SHARED},
    **{name: replace(mistakes.MISTAKES[name], error=RuntimeError) for name in _MIXED},
    "x_channels": Mistake(_channels(lambda c: c + 1)),
    "x_no_channels": Mistake(_channels(lambda c: 0)),
    "x_2d": Mistake(of_tensor("x", lambda x: x.new_ones(x.shape[-2:]))),
    "x_5d": Mistake(of_tensor("x", lambda x: x.new_ones(1, 2, *x.shape[-3:]))),
    "x_unbatched": Mistake(
        of_tensor("x", lambda x: x.new_ones(x.shape[-3:])),
        ValueError,
        lambda c: isinstance(c.tail, BatchNorm) and not _has_batched_operands(c),
    ),
    "x_too_small": Mistake(_too_small, fits=_may_be_too_small),
    "weight_3d": Mistake(of_tensor("weight", lambda w: w[0]), fits=_functional),
    "weight_5d": Mistake(of_tensor("weight", lambda w: w[None]), fits=_functional),
    "weight_channels": Mistake(
        of_tensor("weight", lambda w: w.new_ones(w.shape[0], w.shape[1] + 1, *w.shape[2:])),
        fits=_not_transposed,
    ),
    "weight_number": Mistake(of_tensor("weight", lambda w: 2.0), fits=_functional),
    "bias_2d": Mistake(
        of_tensor("bias", lambda b: b[:, None]),
        fits=lambda c: c.bias is not None and _functional(c),
    ),
    "groups_too_many": Mistake(_setting("groups", lambda c: 2 * c.x.shape[-3]), fits=_functional),
    "groups_do_not_divide": Mistake(
        _setting("groups", lambda c: c.weight.shape[0] - 1),
        fits=lambda c: _functional(c) and c.weight.shape[0] > 2,
    ),
    "groups_zero": Mistake(_setting("groups", 0), fits=_functional),
    "groups_negative": Mistake(_setting("groups", -1), fits=_functional),
    "groups_float": Mistake(_setting("groups", 1.0), fits=_functional),
    "stride_zero": Mistake(_setting("stride", 0), fits=_numbered),
    "stride_negative": Mistake(_setting("stride", (1, -2)), fits=_numbered),
    "stride_float": Mistake(_setting("stride", 1.5), fits=_functional),
    "stride_three": Mistake(_setting("stride", (1, 1, 1)), fits=_numbered),
    "stride_none": Mistake(_setting("stride", None), fits=_functional),
    # torch looks at the dilation, and at the output padding, only where there are images.
    "dilation_zero": Mistake(_setting("dilation", 0), RuntimeError, _numbered),
    "dilation_negative": Mistake(_setting("dilation", (-1, 1)), RuntimeError, _numbered),
    "dilation_word": Mistake(_setting("dilation", "1"), fits=_functional),
    "padding_negative": Mistake(_setting("padding", (0, -1)), fits=_functional),
    "padding_float": Mistake(_setting("padding", (1, 0.5)), fits=_functional),
    "padding_three": Mistake(_setting("padding", (1, 1, 1)), fits=_functional),
    "padding_word": Mistake(_setting("padding", "half"), fits=_functional),
    "padding_none": Mistake(_setting("padding", None), fits=_functional),
    "same_strided": Mistake(
        _setting("padding", "same"),
        fits=lambda c: _not_transposed(c) and _of(c).taps.stride != (1, 1),
    ),
    "same_transposed": Mistake(_setting("padding", "same"), fits=_transposed),
    "padding_takes_all": Mistake(
        _setting("padding", lambda c: max(c.x.shape[-2:]) * 4 + 40), fits=_transposed
    ),
    "output_padding_large": Mistake(
        _setting("output_padding", lambda c: max(*c.taps.stride, *c.taps.dilation)),
        RuntimeError,
        _transposed,
    ),
    "output_padding_negative": Mistake(_setting("output_padding", (0, -1)), fits=_transposed),
    "output_padding_word": Mistake(_setting("output_padding", "1"), fits=_transposed),
    "output_size": Mistake(_output_size, fits=lambda c: _bare_module(c) and _of(c).transposed),
    "reflect": Mistake(_reflected, fits=lambda c: _bare_module(c) and not _of(c).transposed),
    "too_many_conv2d": Mistake(
        too_many(ops.conv2d), ValueError, lambda c: _plain(c) and not _of(c).transposed
    ),
    "too_many_transposed": Mistake(
        too_many(ops.conv_transpose2d), ValueError, lambda c: _plain(c) and _of(c).transposed
    ),
    "module_groups": Mistake(_modules(lambda m: m.Conv2d(4, 6, 3, groups=4)), fits=_bare_module),
    "module_no_groups": Mistake(
        _modules(lambda m: m.ConvTranspose2d(4, 6, 3, groups=0)), fits=_bare_module
    ),
    "module_negative": Mistake(_modules(lambda m: m.Conv2d(-4, 6, 3)), fits=_bare_module),
    "module_padding": Mistake(
        _modules(lambda m: m.Conv2d(4, 6, 3, padding="full")), fits=_bare_module
    ),
    "module_same": Mistake(
        _modules(lambda m: m.Conv2d(4, 6, 3, stride=2, padding="same")), fits=_bare_module
    ),
    "module_mode": Mistake(
        _modules(lambda m: m.ConvTranspose2d(4, 6, 3, padding_mode="reflect")), fits=_bare_module
    ),
    "one_value": Mistake(_one_value, ValueError, _may_be_one_value),
}
