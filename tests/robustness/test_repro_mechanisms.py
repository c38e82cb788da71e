"""The fuzzer draws and forces every mechanism of convolutions, and counts what ran."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from pycutfuse import support
from pycutfuse._loader import native
from pycutfuse.ops import _conv_raw, _gate, _launch
from pycutfuse.testing.forcing import KINDS, conv_kinds_of
from pycutfuse.testing.repro import check, cli, conv_calls, draw_conv
from pycutfuse.testing.repro.calls import flags
from pycutfuse.testing.repro.case import make_case
from pycutfuse.testing.repro.checking import Outcome

from ..ops.simulated_conv import install

BINDING = native().binding
CPU = torch.device("cpu")
SHIFT, PIXELS, IMAGES, PLANES = (
    "straight from the input",
    "a matrix product of its pixels",
    "an implicit gemm",
    "a matrix product of planes as they are",
)
planned = pytest.mark.skipif(
    BINDING is None or bool(support.conv_missing()), reason="no native library with convolutions"
)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is one, as far as plans go."""
    props = BINDING.DeviceProps(major=9, minor=0, sm_count=132)
    monkeypatch.setattr(support, "device_problem", lambda index: None)
    monkeypatch.setattr(support, "device_props", lambda index: props)


@planned
def test_every_mechanism_is_forced_in_a_fair_share(h200: None) -> None:
    counts: Counter[str] = Counter()
    facts = set()
    for seed in range(800):
        config = draw_conv(seed, 2**23)
        if config.mistake is None and config.policy is not None:
            case = make_case(config, CPU)
            with flags(config.allow_tf32):
                found, policy = conv_calls._policies(case), conv_calls._policy(case)
            assert (policy is None) == (not found)
            for name in [name for name, policies in found.items() if policy in policies]:
                counts[name] += 1
                last = config.x.layout == "channels_last"
                facts |= {(name, config.x.dtype), (name, config.tail_name), (name, last)}
                facts.add((name, config.transposed, config.taps.stride == (1, 1)))
    assert min(counts[SHIFT], counts[IMAGES]) > 60, counts
    assert counts[PIXELS] > 10, counts
    assert counts[PLANES] > 5, counts
    for name in (SHIFT, IMAGES):
        wanted = {"float32", "float16", "bfloat16", "batch_norm_train", "batch_norm_eval", "none"}
        assert {(name, one) for one in (*wanted, True, False)} <= facts
    assert {(IMAGES, True, True), (IMAGES, False, False)} <= facts


@planned
def test_kinds_of_policies_that_name_a_mechanism_are_all(h200: None) -> None:
    gathers = BINDING.ConvPolicy(0, gemm=BINDING.GemmPolicy(0, 0, source=1))
    assert conv_kinds_of(gathers) == conv_kinds_of(BINDING.ConvPolicy(0)) == KINDS
    planes = BINDING.ConvPolicy(0, gemm=BINDING.GemmPolicy(0, 0, source=2))
    assert conv_kinds_of(planes) == KINDS[:2]
    for gemm in BINDING.compiled_policies():
        kinds = conv_kinds_of(BINDING.ConvPolicy(0, gemm=gemm))
        assert kinds == (KINDS[:1] if gemm.promote_k else kinds)
        assert 0 < len(kinds) < 3


@planned
def test_plans_say_their_mechanism(h200: None) -> None:
    device = BINDING.DeviceProps()

    def words(policy: object) -> str:
        sizes = (2, 64, 9, 9, 64, 1, 1, 1, 1, 0, 0, 1, 1, 1, 9, 9, False)
        empty = BINDING.Program([], [])
        rest = (empty, BINDING.TAILS["none"], empty, 1, 0, False, True, 64)
        problem = BINDING.ConvProblem(*sizes, *rest)
        return support.conv_mechanism(BINDING.make_conv_plan(problem, device, policy))

    gathers = BINDING.ConvPolicy(0, gemm=BINDING.GemmPolicy(0, 0, source=1))
    shifts = next(p for p in BINDING.compiled_conv_policies() if p.tile_n and p.planes == 1)
    assert words(gathers) == IMAGES
    assert words(BINDING.ConvPolicy(0)) == PIXELS
    assert words(shifts) == SHIFT


@planned
def test_what_was_launched_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr(_gate, "_ON_CPU", _gate._DTYPES)
    monkeypatch.setattr(_conv_raw, "forward", _conv_raw._forward_cuda)
    drawn = (draw_conv(seed, 2**12) for seed in range(100))
    plain = [c for c in drawn if not c.tail and not c.mistake and c.call == "ops"]
    found = [check(config, "cpu") for config in plain]
    _launch.clear_caches()
    launched = [outcome.mechanism for outcome in found if outcome.mechanism]
    assert set(launched) == {"simulated convolution"}
    assert len(launched) + sum(bool(outcome.detours) for outcome in found) >= len(found) > 10


def test_counts_are_printed_and_written(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    names = [IMAGES, SHIFT, IMAGES, ""]

    def run_range(job: object, seeds: range):
        return (Outcome(seed, "correct", mechanism=names[seed]) for seed in seeds)

    monkeypatch.setattr(cli, "run_range", run_range)
    path = tmp_path / "counts.json"
    arguments = ["--family", "conv", "--seed", "0", "--count", "4", "--device", "cpu"]
    assert cli.main([*arguments, "--json", str(path)]) == 0
    assert f"  {2:6d} by {IMAGES}\n  {1:6d} by {SHIFT}\n" in capsys.readouterr().out
    assert json.loads(path.read_text())["mechanisms"] == {IMAGES: 2, SHIFT: 1}


def test_words_of_a_description_without_sizes_are_its_first_line() -> None:
    plan = SimpleNamespace(describe=lambda: "nothing to do\nat all", policy=None)
    assert support.conv_mechanism(plan) == "nothing to do"
    text = "pack x\ntransposed convolution 1x2: by taps, one each\n  epilogue: relu"
    plan = SimpleNamespace(describe=lambda: text, policy=None)
    assert support.conv_mechanism(plan) == "by taps"
