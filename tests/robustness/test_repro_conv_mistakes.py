"""The fuzzer of convolutions judges each mistake, also where it is planned and without images."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pycutfuse import config as settings
from pycutfuse.ops import _launch
from pycutfuse.testing.repro import FAILURES, ConvConfig, check, conv_calls, draw_conv
from pycutfuse.testing.repro.case import make_case
from pycutfuse.testing.repro.conv_mistakes import MISTAKES

from ..ops.simulated_conv import install


def test_a_policy_is_chosen_for_what_is_valid_and_for_no_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, where a fuzzed call is planned before it is made."""
    binding = install(monkeypatch)
    policies = [SimpleNamespace(tile_n=64, planes=p, element=e) for p, e in ((2, 1), (1, 1))]
    monkeypatch.setattr(binding, "compiled_conv_policies", lambda: policies)
    small = [draw_conv(seed, 2**12) for seed in range(400)]
    small = [c for c in small if c.mistake is None and c.padding_mode == "zeros"]
    for config in small[:60]:
        found = conv_calls._policy(make_case(replace(config, policy=0), torch.device("cpu")))
        tiers = {"ieee": policies[0], "tf32": policies[1], "torch": None}
        tier = settings.resolve_conv_tier(config.precision or "default")
        of_dtype = {"float64": None, "float16": policies[1], "bfloat16": policies[1]}
        wanted = of_dtype.get(config.x.dtype, tiers[tier])
        assert found is (None if 0 in config.value_shape else wanted)
    plain = [c for c in small if c.x.dtype == "float32" and 0 not in c.x.shape]
    for name, mistake in MISTAKES.items():
        config = next(config for config in plain if mistake.fits(config))
        case = make_case(replace(config, policy=0, mistake=name), torch.device("cpu"))
        mistake.make(case)
        conv_calls._policy(case)
    _launch.clear_caches()


@pytest.fixture(scope="module")
def without_images() -> list[ConvConfig]:
    drawn = (draw_conv(seed, 2**12) for seed in range(2000))
    return [
        replace(config, program=config.program[:8], after=config.after[:8], backward=())
        for config in drawn
        if config.mistake is None and 0 in config.x.shape and config.padding_mode == "zeros"
    ]


# torch, too, needs no statistics of no values.
@pytest.mark.parametrize("name", [name for name in MISTAKES if name != "no_statistics"])
def test_a_mistake_without_images(name: str, without_images: list[ConvConfig]) -> None:
    """torch raises less then; what we raise nevertheless is what it raises with images."""
    fitting = [config for config in without_images if MISTAKES[name].fits(config)]
    assert fitting
    for config in fitting[:25]:
        outcome = check(replace(config, mistake=name, sized=False), "cpu")
        assert outcome.verdict not in FAILURES, outcome
