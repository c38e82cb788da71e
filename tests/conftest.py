"""Fixtures for all tests: the GPU, a quiet fallback, and counters that start at zero."""

import os
from collections.abc import Iterator

import pytest
import torch

from pycutfuse import config
from pycutfuse.testing import slow_problems_taken

# On a CPU with AMX PyTorch's strided bf16 convolutions to a width of one leave results unwritten
# (pytorch issue 169688). oneDNN reads this when it is first used.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

_gpu = {"run": 0, "skipped": 0}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda(count=1): needs that many CUDA GPUs")
    config.addinivalue_line("markers", "hands_over: slow problems go to PyTorch, as for users")


def _needed(item: pytest.Item) -> int:
    marker = item.get_closest_marker("cuda")
    return 0 if marker is None else int(marker.kwargs.get("count", 1))


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = _needed(item)
    found = torch.cuda.device_count() if needed else 0
    if found < needed:
        pytest.skip(f"needs {needed} CUDA GPU{'s' * (needed > 1)}, found {found}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count in the process that reports, which may not be the one that tests."""
    if "cuda" not in report.keywords:
        return
    if report.when == "call":
        _gpu["run"] += 1
    elif report.when == "setup" and report.skipped:
        _gpu["skipped"] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if any(_gpu.values()):
        terminalreporter.write_line(
            f"GPU tests: {_gpu['run']} ran, {_gpu['skipped']} skipped for lack of a GPU"
        )


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Fallbacks say nothing unless a test asks; counters and warnings start anew."""
    outer = config.set_fallback_policy("silent")
    config.reset_counters()
    yield
    config.set_fallback_policy(outer)
    config.reset_counters()


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small problems reach the kernels, except in tests of what is handed over."""
    if request.node.get_closest_marker("hands_over") is not None:
        yield
        return
    with slow_problems_taken():
        yield


@pytest.fixture
def cuda() -> torch.device:
    """The GPU of tests that are marked `cuda`."""
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and the GPU where there is one."""
    return torch.device(request.param)


@pytest.fixture
def fused() -> None:
    """The test fails if any call ran on torch, and says why: tests of kernels must reach them."""
    config.reset_counters()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Look for the detours that `fused` forbids, also behind another failure, which they cause."""
    try:
        yield
    finally:
        if "fused" in getattr(item, "fixturenames", ()):
            detours = {kind: found for kind, found in config.counters().items() if found}
            assert not detours, f"torch ran instead of the kernels: {detours}"
