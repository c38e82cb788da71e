"""What is run follows the options, and a case that breaks is a result like any other."""

import argparse

import pytest
import torch

from pycutfuse.bench import cli, forced, runner, session, sizes
from pycutfuse.bench.cases import CASES, select
from pycutfuse.bench.results import Run
from pycutfuse.bench.runner import Options
from pycutfuse.bench.timing import Settings

KINDS = ["linear_gelu.2048*", "executor.1024*", "sizes", "sm80"]


def plan(*given):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser.add_subparsers(required=True))
    return cli._plan(parser.parse_args(["bench", *given]))


@pytest.mark.parametrize(
    ("given", "compile", "tuned"),
    [
        ([], True, True),
        (["--no-max-autotune"], True, False),
        (["--no-compile"], False, False),
        (["--no-compile", "--no-max-autotune"], False, False),
        (["--quick"], False, False),
    ],
)
def test_what_is_compiled_follows_the_options(given, compile, tuned):
    options = plan(*given).options
    assert (options.compile, options.tuned) == (compile, tuned)


def test_without_options_everything_is_measured_at_ieee():
    made = plan()
    assert list(made.cases) == list(CASES)
    assert [tier.name for tier in made.tiers] == ["ieee"]
    assert made.host
    assert made.options.settings == Settings()
    assert "tier" not in made.settings


@pytest.mark.parametrize(("tier", "host"), [("all", True), ("bf16", False)])
def test_the_hosts_overhead_is_measured_with_ieee(tier, host):
    assert plan("--tier", tier).host is host


def test_quick_measures_fewer_sizes(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        session, "_add", lambda run, case, options, device: asked.append((case, options.tier))
    )
    kept = []
    session.measure(plan("--quick", "--case", "sizes", "--tier", "all"), kept.append)
    assert [tier for _, tier in asked] == ["ieee", "tf32", "fp16", "bf16"]
    assert len(kept) == 4
    (case,) = select(["sizes"])
    assert case.quick().count == 20


@pytest.mark.parametrize("pattern", KINDS)
def test_a_case_that_breaks_is_a_failed_result(pattern, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of memory")

    for module, name in ((runner, "run_case"), (runner, "run_executor"), (sizes, "run_sizes")):
        monkeypatch.setattr(module, name, broken)
    monkeypatch.setattr(forced, "why_skipped", lambda *_: None)
    monkeypatch.setattr(forced, "run_forced", broken)
    run = Run({}, {})
    (case,) = select([pattern])
    session._add(run, case, Options(), torch.device("cpu"))
    assert len(run.failed) == 1
    assert "out of memory" in str(run)
