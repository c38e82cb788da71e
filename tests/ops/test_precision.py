"""The tier is read at each call from the argument, the context of the thread, or torch's flags."""

import asyncio
import subprocess
import sys
import threading

import pytest
import torch

import pycutfuse as pcf
from pycutfuse import config

FLAGS = """
import torch
{set}
from pycutfuse import config
print(config.resolve_tier("default"), config.resolve_tier("ieee"))
"""


@pytest.mark.parametrize(
    ("statement", "tier"),
    [
        ("pass", "ieee"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "tf32"),
        ("torch.set_float32_matmul_precision('high')", "tf32"),
        ("torch.set_float32_matmul_precision('highest')", "ieee"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "tf32"),
        ("torch.backends.cuda.matmul.fp32_precision = 'ieee'", "ieee"),
        ("torch.backends.fp32_precision = 'tf32'", "tf32"),
        ("torch.backends.cudnn.conv.fp32_precision = 'tf32'", "ieee"),
    ],
)
def test_default_tier_follows_torch(statement: str, tier: str) -> None:
    # A process of its own: torch refuses to mix its old and new settings.
    if "fp32_precision" in statement and not hasattr(torch.backends, "fp32_precision"):
        statement, tier = "pass", "ieee"  # an older torch has only the old flag
    run = subprocess.run(
        [sys.executable, "-c", FLAGS.format(set=statement)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == [tier, "ieee"]


def test_contexts_nest_and_end() -> None:
    assert config.current_precision() == "default"
    with pcf.precision("ieee"):
        with pcf.precision(None):
            assert config.current_precision() == "default"
        assert config.current_precision() == "ieee"
    assert config.current_precision() == "default"


def test_one_context_object_may_nest_in_itself() -> None:
    context = pcf.precision("tf32")
    with context, context:
        assert config.current_precision() == "tf32"
    assert config.current_precision() == "default"


def test_a_context_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), pcf.precision("ieee"):
        raise KeyError
    assert config.current_precision() == "default"


def test_a_context_holds_for_its_thread_only() -> None:
    seen = []
    with pcf.precision("torch"):
        thread = threading.Thread(target=lambda: seen.append(config.current_precision()))
        thread.start()
        thread.join()
    assert seen == ["default"]


def test_threads_may_share_a_context_object() -> None:
    context, seen = pcf.precision("ieee"), []
    steps = [threading.Event() for _ in range(2)]

    def other() -> None:
        with pcf.precision("tf32"):
            with context:
                steps[0].set()
                steps[1].wait(10)
            seen.append(config.current_precision())

    thread = threading.Thread(target=other)
    with context:
        thread.start()
        steps[0].wait(10)
    seen.append(config.current_precision())
    steps[1].set()
    thread.join()
    assert seen == ["default", "tf32"]


def test_tasks_may_leave_their_contexts_in_any_order() -> None:
    async def task(tier: config.Precision, own: asyncio.Event, other: asyncio.Event) -> None:
        with pcf.precision(tier):
            own.set()
            await other.wait()

    async def both() -> None:
        entered, left = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(task("ieee", asyncio.Event(), entered))
        second = asyncio.create_task(task("tf32", entered, left))
        await first
        assert config.current_precision() == "tf32"
        left.set()
        await second

    asyncio.run(both())
    assert config.current_precision() == "default"


def test_an_argument_wins_over_the_context() -> None:
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    with pcf.precision("tf32"):
        assert pcf.explain(pcf.ops.linear, x, weight).tier == "tf32"
        assert pcf.explain(pcf.ops.linear, x, weight, precision="ieee").tier == "ieee"
        assert pcf.explain(pcf.nn.Linear(3, 4, precision="torch"), x).tier == "torch"


@pytest.mark.cuda
def test_torchs_tier_is_handed_over_silently(cuda: torch.device) -> None:
    x, weight = torch.randn(8, 16, device=cuda), torch.randn(4, 16, device=cuda)
    result = pcf.ops.linear(x, weight, precision="torch")
    assert torch.equal(result, torch.nn.functional.linear(x, weight))
    assert sum(pcf.counters()["handover"].values()) == 1
    assert pcf.explain(pcf.ops.linear, x, weight, precision="torch").path == "hand-over"


@pytest.mark.cuda
def test_explicit_ieee_holds_under_tf32_flags(cuda: torch.device) -> None:
    # K = 0 is handed over, so the bias alone would not tell; 1-row problems run on any path.
    x, weight = torch.rand(64, 512, device=cuda), torch.rand(32, 512, device=cuda)
    x.requires_grad_()
    weight.requires_grad_()
    exact = x.double() @ weight.double().T
    outer = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        result = pcf.ops.linear(x, weight, precision="ieee")
        result.backward(torch.ones_like(result))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = outer
    assert float((result - exact).abs().max() / exact.abs().max()) < 1e-6
    wanted = weight.double().sum(0).expand_as(x)
    assert float((x.grad - wanted).abs().max() / wanted.abs().max()) < 1e-6
