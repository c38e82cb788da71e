"""Threads, streams, devices and CUDA graphs."""

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse.ops import _launch
from pycutfuse.testing import generate


def test_threads_share_the_plan_cache(device: torch.device) -> None:
    errors: list[BaseException] = []
    weight = generate("randn", (48, 64), seed=1, device=device)
    start = threading.Barrier(4)

    def work(offset: int) -> None:
        try:
            start.wait()
            for rows in range(1, 30):
                x = generate("randn", (rows + offset, 64), seed=rows, device=device)
                result = pcf.ops.linear(x, weight, epilogue=(pcf.relu(),))
                torch.testing.assert_close(
                    result, F.relu(F.linear(x, weight)), rtol=1e-4, atol=1e-4
                )
        except BaseException as error:  # reported by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(at % 2,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_each_thread_has_its_precision(device: torch.device) -> None:
    x, weight = torch.ones(4, 8, device=device), torch.ones(6, 8, device=device)
    tiers: dict[str, set[str]] = {}
    start = threading.Barrier(2)

    def work(tier: str) -> None:
        start.wait()
        with pcf.precision(tier):
            tiers[tier] = {pcf.explain(pcf.ops.linear, x, weight).tier for _ in range(50)}

    threads = [threading.Thread(target=work, args=(tier,)) for tier in ("ieee", "torch")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tiers == {"ieee": {"ieee"}, "torch": {"torch"}}


def check_on_streams(calls: Sequence[Callable[[], Tensor]], times: int) -> None:
    """Each call again and again, in a thread and on a stream of its own, gives the same bits."""
    expected = [call() for call in calls]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(at: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(times):
                if not torch.equal(calls[at](), expected[at]):
                    wrong.append(at)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.cuda
def test_threads_on_their_own_streams(cuda: torch.device, fused: None) -> None:
    x = generate("rand", (300, 512), seed=2, device=cuda)
    weight = generate("rand", (256, 512), seed=3, device=cuda)
    check_on_streams(2 * [lambda: pcf.ops.linear(x, weight)], 50)


@pytest.mark.cuda
def test_blocks_that_wait_do_not_hold_each_other_up(cuda: torch.device, fused: None) -> None:
    """Blocks of several launches share the GPU, and each waits for those of its own launch."""
    x = generate("randn", (1024, 256), seed=1, device=cuda)
    weights = [generate("randn", (8192, 256), seed=seed, device=cuda) for seed in range(4)]
    norm = partial(pcf.ops.linear_batch_norm, x, training=True)
    check_on_streams([partial(norm, weight=weight) for weight in weights], 100)


@pytest.mark.cuda
def test_a_side_stream_is_used(cuda: torch.device, fused: None) -> None:
    x = torch.zeros(256, 512, device=cuda)
    weight = generate("rand", (256, 512), seed=3, device=cuda)
    pcf.ops.linear(x, weight)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        x.fill_(1.0)
        result = pcf.ops.linear(x, weight)  # must come after the fill, on its stream
    side.synchronize()
    torch.testing.assert_close(result, weight.sum(1).expand(256, 256), rtol=1e-5, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("tier", ["tf32", "ieee"])
def test_a_convolution_begins_after_what_wrote_x(
    tier: str, cuda: torch.device, fused: None
) -> None:
    """Its kernel reads x while the weight is still packed, but no sooner than x is written."""
    x = torch.zeros(64, 8, 128, 128, device=cuda)
    weight = generate("rand", (64, 8, 3, 3), seed=3, device=cuda)
    sums = weight.sum((1, 2, 3)).view(1, 64, 1, 1)
    results = []
    with pcf.precision(tier):
        for value in range(1, 5):
            torch.cuda._sleep(5_000_000)
            x.fill_(float(value))
            results.append(pcf.ops.conv2d(x, weight))
    for value, result in enumerate(results, 1):
        expected = (value * sums).expand_as(result)
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=0.0)


@pytest.mark.cuda
@pytest.mark.parametrize("training", [True, False])
def test_capture_and_replay(training: bool, cuda: torch.device, fused: None) -> None:
    layer = pcf.nn.LinearScaleBatchNorm1d(96, 64, (64,), device=cuda).train(training)
    twin = layer.to_torch()
    x = generate("randn", (130, 96), seed=1, device=cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            result = layer(x)
        for seed in range(3):
            x.copy_(generate("randn", (130, 96), seed=seed))
            layer.gemm.weight.add_(0.01)
            counted = int(layer.bn.num_batches_tracked)
            graph.replay()
            assert int(layer.bn.num_batches_tracked) == counted + training
            if training:
                z = twin.gemm(x) * twin.scale
                expected = F.batch_norm(z, None, None, twin.bn.weight, twin.bn.bias, True)
            else:
                expected = twin(x)
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


FIRST_CALL = """
import torch, pycutfuse as pcf
from pycutfuse.testing import slow_problems_taken
layer = pcf.nn.LinearScaleBatchNorm1d(96, 64, (64,), device="cuda")
x = torch.rand(130, 96, device="cuda")
graph = torch.cuda.CUDAGraph()
with slow_problems_taken(), torch.no_grad(), torch.cuda.graph(graph):
    result = layer(x)
graph.replay()
chain = layer.to_torch()
expected = torch.nn.functional.batch_norm(chain.gemm(x) * chain.scale, None, None, training=True)
torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
assert not any(pcf.counters().values()), pcf.counters()
assert int(layer.bn.num_batches_tracked) == 1
"""


@pytest.mark.cuda
def test_the_first_call_ever_may_be_captured() -> None:
    run = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.cuda(count=2)
def test_tensors_on_another_device_than_the_current() -> None:
    torch.cuda.set_device(0)
    layer = pcf.nn.LinearScaleBatchNorm1d(96, 64, (64,), device="cuda:1")
    x = generate("randn", (130, 96), seed=1, device="cuda:1")
    with torch.no_grad():
        result = layer(x)
    assert result.device == x.device
    assert torch.cuda.current_device() == 0
    chain = layer.to_torch().train()
    expected = F.batch_norm(chain.gemm(x) * chain.scale, None, None, training=True)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert not any(pcf.counters().values())


@pytest.mark.cuda
def test_an_eager_call_allocates_its_output_and_a_workspace_only(cuda: torch.device) -> None:
    layer = pcf.nn.LinearScaleBatchNorm1d(96, 64, (64,), device=cuda)
    x = generate("randn", (130, 96), seed=1, device=cuda)
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        key = "allocation.all.allocated"
        before = torch.cuda.memory_stats()[key]
        result = layer(x)
        assert torch.cuda.memory_stats()[key] - before == 2
    assert result.shape == (130, 64)
    assert len(_launch._recipes) > 0
