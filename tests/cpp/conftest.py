"""Without nvcc a build has no host test module and maybe no library: their tests are left out.

With nvcc both can be built, so a test that misses one fails.
"""

import pytest

from pycutfuse._loader import native

from ..packaging.building import NVCC
from .native import host_modules

collect_ignore_glob: list[str] = []
if NVCC is None and native().binding is None:
    collect_ignore_glob.append("test_*.py")
elif NVCC is None and not host_modules():
    collect_ignore_glob += [
        "test_checked_math.py",
        "test_invalid_plans.py",
        "test_logsumexp.py",
        "test_no_memory.py",
        "test_status.py",
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if collect_ignore_glob:
        terminalreporter.write_line(
            f"tests/cpp: no nvcc, so {', '.join(collect_ignore_glob)} of it did not run"
        )
