"""Running out of host memory is an error like any other."""

import subprocess
import sys

from .native import ROOT

OUT_OF_MEMORY = 5  # Code::kOutOfMemory

PLANS = """
from tests.cpp.native import host_module
plan = host_module().plan_without_memory
print(*(plan(allocations) for allocations in (0, 1, 2, 5, 10, 100, 1_000_000)))
"""


def test_a_convolution_plan_without_memory_is_refused() -> None:
    """In a process of its own: an exception that leaves a noexcept function ends it."""
    done = subprocess.run(
        [sys.executable, "-c", PLANS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [int(code) for code in done.stdout.split()] == [OUT_OF_MEMORY] * 6 + [0]
