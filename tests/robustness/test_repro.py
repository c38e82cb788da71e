"""The fuzzer repeats itself from a seed, finds what is planted, and outlives what it runs."""

import json
import signal
import time

import pytest
import torch

from pycutfuse.testing import GuardError, repro
from pycutfuse.testing.repro import (
    FAILURES,
    Outcome,
    calls,
    check,
    checking,
    cli,
    draw_linear,
    runner,
    source,
)
from pycutfuse.testing.repro.envelope import Rounding
from pycutfuse.testing.repro.mistakes import MISTAKES

LIMIT = 2**18
JOB = runner.Job("linear", "cpu", 18, timeout_s=60.0)


@pytest.fixture(autouse=True)
def one_thread():
    """Small problems: threads would only wait for each other."""
    outer = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(outer)


def found(pick, limit: int = LIMIT):
    """The first configuration that `pick` accepts."""
    return next(c for c in (draw_linear(seed, limit) for seed in range(3000)) if pick(c))


def valid(config) -> bool:
    return config.mistake is None and 0 not in (*config.x.shape, *config.weight.shape)


def plain(config) -> bool:
    kinds = {config.x.dtype, config.weight.dtype}
    specials = config.x.specials + config.weight.specials
    bare = not config.program and config.tail is None and not config.integers
    return valid(config) and bare and kinds == {"float32"} and not specials


@pytest.mark.parametrize("seed", range(40))
def test_drawn_calls_are_right_on_the_cpu(seed: int) -> None:
    outcome = check(draw_linear(seed, LIMIT), "cpu")
    assert outcome.verdict not in FAILURES, outcome


@pytest.mark.cuda
def test_drawn_calls_are_right_on_the_gpu(cuda: torch.device) -> None:
    job = runner.Job("linear", str(cuda), 33)
    failed = [o for o in runner.run_range(job, range(100)) if o.verdict in FAILURES]
    assert not failed, [(job.command(o.seed), o.detail) for o in failed]


def test_a_seed_gives_one_configuration_and_its_text_gives_it_back() -> None:
    for seed in range(200):
        config = draw_linear(seed, LIMIT)
        text = source(config)
        assert source(draw_linear(seed, LIMIT)) == text
        assert eval(text, vars(repro).copy()) == config


def test_seeds_differ_and_a_quarter_is_invalid() -> None:
    drawn = [draw_linear(seed, LIMIT) for seed in range(6000)]
    assert len({source(c).split("seed=")[1].split("\n", 1)[1] for c in drawn}) > 5700
    assert 0.2 < sum(c.mistake is not None for c in drawn) / len(drawn) < 0.3
    assert {c.mistake for c in drawn} - {None} == set(MISTAKES)


def test_sizes_keep_to_the_limit() -> None:
    for seed in range(500):
        config = draw_linear(seed, LIMIT)
        assert torch.Size(config.x.shape).numel() * config.n <= LIMIT


@pytest.mark.parametrize(
    ("spoil", "verdict", "words"),
    [
        (lambda out: out + out.abs().mean() * 1e-4, "wrong", "scaled error"),
        (lambda out: out.where(torch.rand_like(out) > 0.5, float("nan")), "wrong", "kind"),
        (lambda out: out.double(), "wrong", "dtype"),
        (lambda out: out[None], "wrong", "shape"),
    ],
)
def test_a_spoiled_result_is_wrong(monkeypatch, spoil, verdict: str, words: str) -> None:
    config = found(lambda c: plain(c) and not c.backward and c.n > 8)
    assert _judged(monkeypatch, config, spoil).verdict == verdict
    assert words in _judged(monkeypatch, config, spoil).detail


def _judged(monkeypatch, config, spoil) -> Outcome:
    monkeypatch.setattr(checking, "our_call", lambda case: spoil(calls.our_call(case)))
    return check(config, "cpu")


def test_one_wrong_element_behind_a_program_is_seen(monkeypatch) -> None:
    config = found(lambda c: valid(c) and len(c.program) == 3 and plain_but_program(c))

    def spoil(out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out.view(-1)[-1] += 0.01 + 0.01 * out.view(-1)[-1].abs()
        return out

    assert _judged(monkeypatch, config, lambda out: out).verdict == "correct"
    assert _judged(monkeypatch, config, spoil).verdict == "wrong"


def plain_but_program(config) -> bool:
    mild = {config.x.fill, config.weight.fill} <= {"rand", "randn"} and config.weight.exponent < 0
    names = {step.name for step in config.program}
    return mild and config.x.dtype == "float32" and not config.backward and "div" not in names


def test_a_wrong_gradient_is_seen(monkeypatch) -> None:
    config = found(lambda c: plain(c) and "x" in c.backward and c.n > 8)

    def spoil(out: torch.Tensor) -> torch.Tensor:
        return out + (out * 1e-4 - (out * 1e-4).detach())

    outcome = _judged(monkeypatch, config, spoil)
    assert (outcome.verdict, outcome.detail[:11]) == ("wrong", "gradient of")


def test_wrong_running_statistics_are_seen(monkeypatch) -> None:
    config = found(lambda c: valid(c) and c.call == "ops" and c.tail and c.tail.track)

    def call(case):
        out = calls.our_call(case)
        case.statistics.count.add_(1)
        return out

    monkeypatch.setattr(checking, "our_call", call)
    assert "count" in check(config, "cpu").detail


def test_inexact_whole_numbers_are_seen(monkeypatch) -> None:
    config = found(lambda c: valid(c) and c.integers and not c.program and not c.backward)
    assert _judged(monkeypatch, config, lambda out: out).verdict == "correct"
    outcome = _judged(monkeypatch, config, lambda out: out * (1 + 2.0**-23))
    assert "not exact" in outcome.detail


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "crash"),
        (RuntimeError("no plan"), "unclean"),
        (GuardError("allocation 0"), "wrong"),
    ],
)
def test_what_a_valid_call_raises_is_a_failure(monkeypatch, error, verdict: str) -> None:
    def fail(out):
        raise error

    outcome = _judged(monkeypatch, found(plain), fail)
    assert (outcome.verdict, outcome.lost) == (verdict, verdict == "crash")


def test_an_invalid_call_must_raise_the_right_type_with_a_value(monkeypatch) -> None:
    config = found(lambda c: c.mistake == "x_features")
    assert check(config, "cpu").verdict == "rejected"
    for error, verdict in (
        (None, "wrong"),
        (ValueError("x has 3"), "unclean"),
        (RuntimeError("bad"), "unclean"),
    ):

        def call(case, error=error):
            if error is not None:
                raise error

        monkeypatch.setattr(checking, "our_call", call)
        assert check(config, "cpu").verdict == verdict


def test_the_floor_is_that_of_the_promise() -> None:
    assert Rounding.of(torch.float32, "ieee", 64).floor == 2.0**-22
    assert Rounding.of(torch.float32, "tf32", 64).floor == 2.0**-10
    assert Rounding.of(torch.bfloat16, "ieee", 64).floor == 2.0**-8


def _die_at_3(sender, job, seeds) -> None:
    sender.send("ready")
    for seed in seeds:
        if seed == 3:
            signal.raise_signal(signal.SIGKILL)
        if seed == 5:
            time.sleep(60)
        sender.send(Outcome(seed, "correct"))


def test_a_process_that_dies_or_hangs_costs_its_seed_only() -> None:
    job = runner.Job("linear", "cpu", 18, timeout_s=0.5)
    outcomes = list(runner.run_range(job, range(7), _die_at_3))
    assert [o.seed for o in outcomes] == list(range(7))
    assert [o.seed for o in outcomes if o.verdict == "crash"] == [3, 5]
    assert "SIGKILL" in outcomes[3].detail
    assert "0.5 s" in outcomes[5].detail


def _never_ready(sender, job, seeds) -> None:
    raise SystemExit(7)


def test_a_process_that_cannot_start_is_no_result() -> None:
    with pytest.raises(runner.ChildFailedError, match="exit status 7"):
        list(runner.run_range(JOB, range(2), _never_ready))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--seed", "-1"],
        ["--seed", "one"],
        ["--seed", "1", "--family", "pool"],
        ["--seed", "1", "--count", "0"],
        ["--seed", "1", "--device", "tpu"],
        ["--seed", "1", "--device", "cuda:99"],
        ["--seed", "1", "--limit", "99"],
        ["--seed", "1", "--timeout", "-1"],
        ["--seed", "1", "--json", "/nowhere/at/all.json"],
    ],
    ids=" ".join,
)
def test_nonsense_ends_with_2_and_a_reason(arguments: list[str], capsys) -> None:
    try:
        status = cli.main(arguments)
    except SystemExit as stop:
        status = stop.code
    assert status == cli.USAGE
    assert capsys.readouterr().err


def test_one_seed_prints_python_that_repeats_it(capsys) -> None:
    assert cli.main(["--seed", "3", "--device", "cpu"]) == cli.OK
    text = capsys.readouterr().out
    code = text.split("# seed 3")[0]
    exec(compile(code, "pasted", "exec"), {})
    assert "verdict='" in capsys.readouterr().out
    assert "# seed 3: " in text


def test_a_range_counts_and_names_its_failures(monkeypatch, tmp_path, capsys) -> None:
    def outcomes(job, seeds):
        detours = ("fallback: linear: cpu tensors",)
        yield Outcome(seeds[0], "correct", ratio=0.5, detours=detours)
        yield Outcome(seeds[1], "wrong", "output: bad")

    monkeypatch.setattr(cli, "run_range", outcomes)
    path = tmp_path / "counts.json"
    arguments = ["--seed", "7", "--count", "2", "--device", "cpu", "--json", str(path)]
    assert cli.main(arguments) == cli.FAILED
    written = json.loads(path.read_text())
    assert written["counts"] == {"correct": 1, "rejected": 0, "wrong": 1, "crash": 0, "unclean": 0}
    assert written["fallbacks"] == 1
    command = "python -m pycutfuse.testing.repro --family linear --seed 8 --device cpu"
    assert written["failures"][0]["command"] == command
    assert command in capsys.readouterr().out


def test_a_range_runs_in_a_child(capsys) -> None:
    assert cli.main(["--seed", "0", "--count", "3", "--device", "cpu", "--limit", "12"]) == cli.OK
    assert "[3/3]" in capsys.readouterr().err
