"""The fuzzer of convolutions draws all kinds of calls, and finds what is planted."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pycutfuse.geometry import Geometry
from pycutfuse.ops import _conv_raw
from pycutfuse.testing import repro
from pycutfuse.testing.repro import (
    FAILURES,
    ConvConfig,
    TensorRecipe,
    calls,
    check,
    checking,
    draw_conv,
    runner,
    source,
)
from pycutfuse.testing.repro.conv import both
from pycutfuse.testing.repro.conv_mistakes import MISTAKES
from pycutfuse.testing.repro.judge import compare_form

LIMIT = 2**17
DRAWN = [draw_conv(seed, 2**31) for seed in range(1500)]
VALID = [config for config in DRAWN if config.mistake is None]


@pytest.fixture(autouse=True)
def one_thread():
    """Small problems: threads would only wait for each other."""
    outer = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(outer)


@pytest.mark.parametrize("seed", range(60))
def test_drawn_calls_are_right_on_the_cpu(seed: int) -> None:
    outcome = check(draw_conv(seed, LIMIT), "cpu")
    assert outcome.verdict not in FAILURES, outcome


@pytest.mark.cuda
def test_drawn_calls_are_right_on_the_gpu(cuda: torch.device) -> None:
    job = runner.Job("conv", str(cuda), 31)
    failed = [o for o in runner.run_range(job, range(100)) if o.verdict in FAILURES]
    assert not failed, [(job.command(o.seed), o.detail) for o in failed]


def test_a_seed_gives_one_configuration_and_its_text_gives_it_back() -> None:
    for config in DRAWN[:200]:
        text = source(config)
        assert source(draw_conv(config.seed, 2**31)) == text
        assert eval(text, vars(repro).copy()) == config


def test_a_quarter_is_invalid_in_every_way() -> None:
    assert 0.2 < 1 - len(VALID) / len(DRAWN) < 0.3
    assert len({config.mistake for config in DRAWN}) > 0.8 * len(MISTAKES)
    for name, mistake in MISTAKES.items():
        assert any(mistake.fits(config) for config in VALID), name


@pytest.mark.parametrize("limit", [2**8, LIMIT, 2**31])
def test_sizes_keep_to_the_limit_and_make_a_result(limit: int) -> None:
    for seed in range(300):
        config = draw_conv(seed, limit)
        assert config.work <= limit
        assert min(config.size) >= 1
        assert max(torch.Size(s).numel() for s in (config.x.shape, config.value_shape)) <= 2**23


SEEN: dict[str, tuple[Callable[[ConvConfig], object], set[object]]] = {
    "kinds": (lambda c: (c.transposed, c.tail_name), {(True, "none"), (False, "batch_norm_eval")}),
    "training": (lambda c: c.tail and (c.tail.training, c.tail.momentum), {(True, None)}),
    "batches": (lambda c: c.x.shape[0] if len(c.x.shape) == 4 else None, {None, 0, 1, 2, 17}),
    "channels": (lambda c: c.x.shape[-3], {1, 2, 3, 64, 65, 70}),
    "out channels": (lambda c: c.n, {1, 63, 64, 65, 129, 192, 200}),
    "kernels": (lambda c: c.kernel, {(1, 1), (3, 3), (11, 11), (1, 3), (5, 3)}),
    "strides": (lambda c: both(c.stride), {(1, 1), (2, 2), (4, 4), (2, 1), (1, 4)}),
    "dilations": (lambda c: both(c.dilation), {(1, 1), (2, 2), (3, 3), (1, 2)}),
    "paddings": (lambda c: c.padding, {0, 1, (1, 1), "same", "valid"}),
    "extra": (lambda c: both(c.output_padding), {(0, 0), (0, 1), (1, 0)}),
    "groups": (lambda c: c.groups, {1, 2, 3, 4, 8, 16}),
    "depthwise": (lambda c: c.groups > 1 and c.groups == c.x.shape[-3], {True, False}),
    "sides": (lambda c: c.x.shape[-1], {1, 2, 61, 64, 67, 70, 257, 599, 600}),
    "pixels": (lambda c: c.size == (1, 1), {True, False}),
    "dtypes": (lambda c: c.x.dtype, {"float32", "float16", "bfloat16", "float64"}),
    "layouts": (lambda c: c.x.layout, {"channels_last", "gray", "expanded", "offset", "sliced"}),
    "fills": (lambda c: c.weight.fill, {"rand", "lognormal", "zeros", "planes", "integers"}),
    "range": (lambda c: (c.x.exponent, c.weight.exponent), {(100, -100), (-100, -100), (40, 40)}),
    "special": (
        lambda c: (c.x.specials > 0, c.weight.specials > 0),
        {(True, False), (False, True)},
    ),
    "modes": (lambda c: c.padding_mode, {"zeros", "reflect", "replicate", "circular"}),
    "calls": (lambda c: (c.call, c.sized, c.frozen), {("module", True, False)}),
    "tiers": (lambda c: (c.precision, c.allow_tf32), {(None, True), (None, False), ("ieee", True)}),
    "gradients": (lambda c: len(c.backward) > 3, {True, False}),
    "operands": (
        lambda c: {s.operand and len(s.operand.shape) for s in c.program} >= {0, 3},
        {True},
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_every_kind_of_call_is_drawn(name: str) -> None:
    fact, wanted = SEEN[name]
    assert wanted <= {fact(config) for config in VALID}


# What a kernel may get wrong: of x, weight, bias, geometry and the right result.
Fault = Callable[[Tensor, Tensor, Tensor | None, Geometry, Tensor], Tensor]
_convolution = _conv_raw.torch_convolution


def again(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    return _convolution(x, weight, bias, geometry, "ieee")


def without_middle(weight: Tensor) -> Tensor:
    """One tap set to zero, which mostly lies inside the image."""
    made = weight.clone()
    made[..., weight.shape[-2] // 2, weight.shape[-1] // 2] = 0
    return made


def with_last(tensor: Tensor, factor: float) -> Tensor:
    """Its last column of the last row of each plane multiplied by `factor`."""
    made = tensor.clone()
    made[..., -1, -1] *= factor
    return made


FAULTS: dict[str, Fault] = {
    "a filter tap is left out": lambda x, w, b, g, out: again(x, without_middle(w), b, g),
    "the filter is turned": lambda x, w, b, g, out: again(x, w.flip(-1), b, g),
    "channels are moved": lambda x, w, b, g, out: out.roll(1, 1),
    "the bias is left out": lambda x, w, b, g, out: again(x, w, None, g),
    "a pixel is off by 2^-14": lambda x, w, b, g, out: with_last(out, 1 + 2.0**-14),
    "a pixel is not written": lambda x, w, b, g, out: with_last(out, float("nan")),
    "x is rounded": lambda x, w, b, g, out: again(x.bfloat16().float(), w, b, g),
}


def concerns(fault: str, config: ConvConfig) -> bool:
    """Whether the fault changes a bare float32 call of `config` at all."""
    bare = not (config.program or config.tail or config.backward or config.mistake)
    x, weight = config.x, config.weight
    even = {x.layout, weight.layout} & {"expanded", "constant", "gray"}
    found = bare and x.dtype == "float32" and 0 not in config.value_shape and not even
    found = found and weight.fill != "zeros" and abs(x.exponent) < 40 and x.specials == 0
    if fault == "the bias is left out":
        return found and config.bias is not None
    if fault == "channels are moved":
        return found and config.n > 1
    if fault == "the filter is turned":
        return found and config.kernel[1] > 1
    return found and (fault != "x is rounded" or not config.integers)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]

    def faulty(x: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry, tier: str) -> Tensor:
        return fault(x, weight, bias, g, _convolution(x, weight, bias, g, tier))

    drawn = [c for c in (draw_conv(seed, 2**14) for seed in range(1000)) if concerns(name, c)]
    assert all(check(config, "cpu").verdict == "correct" for config in drawn[:20])
    monkeypatch.setattr(_conv_raw, "torch_convolution", faulty)
    verdicts = Counter(check(config, "cpu").verdict for config in drawn)
    # A tap may lie in the padding, a pixel be 0 or below the range.
    assert verdicts["wrong"] > 0.8 * len(drawn) >= 8, verdicts


def judged(monkeypatch: pytest.MonkeyPatch, config: ConvConfig, spoil) -> repro.Outcome:
    monkeypatch.setattr(checking, "our_call", lambda case: spoil(case, calls.our_call(case)))
    return check(config, "cpu")


SPECIAL = ConvConfig(
    5, TensorRecipe((2, 3, 9, 9), specials=1), TensorRecipe((4, 3, 3, 3)), padding=1
)


def test_a_nan_that_spreads_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def spread(case, out: Tensor) -> Tensor:
        return out.where(out.isfinite().all(-1, keepdim=True), float("nan"))

    assert judged(monkeypatch, SPECIAL, lambda case, out: out).verdict == "correct"
    assert "another kind" in judged(monkeypatch, SPECIAL, spread).detail


def test_a_gap_that_is_written_to_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(SPECIAL, x=TensorRecipe((2, 3, 9, 9), layout="padded"))

    def write(case, out: Tensor) -> Tensor:
        x = case.tensors["x"]
        x.as_strided((1,), (1,), x.shape[-1]).zero_()
        return out

    assert judged(monkeypatch, config, write).detail == "x was written to"


def test_a_wrong_running_statistic_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(
        SPECIAL, x=TensorRecipe((2, 3, 9, 9)), tail=repro.BatchNorm(), guarded=False, call="ops"
    )

    def count(case, out: Tensor) -> Tensor:
        case.statistics.var[3] *= 1 + 2.0**-10
        return out

    assert judged(monkeypatch, config, lambda case, out: out).verdict == "correct"
    assert "running_var" in judged(monkeypatch, config, count).detail


@pytest.mark.parametrize("name", ["x", "weight", "bias", "bn_weight", "after0"])
def test_a_wrong_gradient_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = repro.StepRecipe("mul", operand=TensorRecipe((4, 1, 1)))
    config = ConvConfig(
        5,
        TensorRecipe((2, 3, 9, 8)),
        TensorRecipe((4, 3, 3, 2)),
        TensorRecipe((4,)),
        (repro.StepRecipe("silu"),),
        repro.BatchNorm(),
        (scale,),
        stride=2,
        padding=1,
        backward=(name,),
    )
    run = checking._run

    def off(case, call, upstream):
        result = run(case, call, upstream)
        if call is checking.our_call and name in result.gradients:
            result.gradients[name].view(-1)[0] *= 1.001
        return result

    assert check(config, "cpu").verdict == "correct"
    monkeypatch.setattr(checking, "_run", off)
    assert check(config, "cpu").detail.startswith(f"gradient of {name}")


def test_strides_are_compared_where_there_is_more_than_one() -> None:
    tensor = torch.ones(2, 3, 4, 5)
    last = tensor.to(memory_format=torch.channels_last)
    assert compare_form(last, tensor) is None
    assert "strides" in str(compare_form(last, tensor, strides=True))
    one = torch.ones(2, 1, 4, 5)
    other = one.to(memory_format=torch.channels_last)
    assert one.stride() != other.stride()
    assert compare_form(other, one, strides=True) is None
