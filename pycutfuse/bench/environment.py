"""What a result was measured on: versions, GPU, clocks, commit."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from pycutfuse._loader import LIBRARY_NAME, PACKAGE, native
from pycutfuse.bench.flags import describe_precision

_CLOCK_FIELDS = {
    "sm_mhz": "clocks.sm",
    "sm_max_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}


def describe(package: Path | None = None) -> dict[str, Any]:
    """Versions, GPU, driver, flags and commit, ready for JSON.

    Parameters
    ----------
    package : Path, optional
        Folder whose git commit is stated; by default that of this package.
    """
    cuda = torch.cuda.is_available()
    return {
        "pycutfuse": _version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "gpu_sms": torch.cuda.get_device_properties(0).multi_processor_count if cuda else None,
        "driver": query(["driver_version"])[0] if cuda else None,
        "fp32_precision": describe_precision(),
        "library": library(),
        "commit": commit(Path(__file__).resolve().parent if package is None else package),
    }


def library() -> dict[str, str] | None:
    """How libcutfuse was built and which file it is; None where it is not loaded."""
    binding = native().binding
    if binding is None:
        return None
    digest = hashlib.sha256((PACKAGE / LIBRARY_NAME).read_bytes()).hexdigest()
    return {"build": binding.build_info(), "sha256": digest[:16]}


def clocks() -> dict[str, float] | None:
    """Clocks in MHz, power in W and temperature now; None where nvidia-smi does not say."""
    values = query(list(_CLOCK_FIELDS.values()))
    found: dict[str, float] = {}
    for name, value in zip(_CLOCK_FIELDS, values, strict=True):
        try:
            found[name] = float(value or "")
        except ValueError:  # "[N/A]"
            continue
    return found or None


def query(fields: list[str]) -> list[str | None]:
    """Fields of the current GPU from nvidia-smi, None for each where it cannot be asked."""
    nothing: list[str | None] = [None] * len(fields)
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    uuid = _uuid()
    if uuid is not None:
        command.append(f"--id={uuid}")
    text = _output(command)
    values = [value.strip() for value in text.splitlines()[0].split(",")] if text else []
    return list(values) if len(values) == len(fields) else nothing


def commit(folder: Path) -> str | None:
    """HEAD of the repository around `folder`, with ``+`` if tracked files differ; None if none."""
    head = _output(["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"])
    if not head:
        return None
    changed = _output(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    return head.strip() + ("+" if changed else "")


def _uuid() -> str | None:
    if not torch.cuda.is_available():
        return None
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 and done.stdout.strip() else None


def _version() -> str:
    import pycutfuse

    return str(getattr(pycutfuse, "__version__", "unknown"))
