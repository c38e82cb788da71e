"""`python -m pycutfuse info`: what is installed, what it runs on, and what is missing."""

import json
import platform
from typing import Any

import torch

import pycutfuse
from pycutfuse import support
from pycutfuse._loader import LIBRARY_NAME, PACKAGE, native
from pycutfuse.program import MAX_STEPS, OPS

NO_PTX_NOTE = "the build embeds no PTX: on a GPU newer than it the plain torch chains run"
PTX_NOTE = "on a GPU newer than the build the driver compiles the embedded PTX once, at first use"


def _library() -> dict[str, Any]:
    loaded = native()
    found: dict[str, Any] = {
        "loaded": loaded.binding is not None,
        "diagnosis": loaded.diagnosis,
        "missing": list(loaded.missing),
        "folder": str(PACKAGE),
    }
    binding = loaded.binding
    if binding is None:
        return found
    found |= {
        "version": binding.version(),
        "abi": binding.abi_version(),
        "build": binding.build_info(),
        "policies": [repr(policy) for policy in binding.compiled_policies()],
        "conv_policies": [repr(policy) for policy in _conv_policies(binding)],
        "note": PTX_NOTE if "compute_" in binding.build_info() else NO_PTX_NOTE,
    }
    expected = {"OPS": OPS, "MAX_STEPS": MAX_STEPS}
    found["disagrees"] = [
        name for name, value in expected.items() if getattr(binding, name) != value
    ]
    return found


def _conv_policies(binding: Any) -> list[Any]:
    """Of a library that has convolutions."""
    return [] if support.conv_missing() else list(binding.compiled_conv_policies())


def _devices() -> list[dict[str, Any]]:
    binding = native().binding
    if binding is None:
        # Counting asks NVML and creates no context; properties would.
        reason = "the native library is not loaded"
        return [
            {"index": index, "runs": False, "why_not": reason}
            for index in range(torch.cuda.device_count())
        ]
    devices = []
    for index in range(binding.device_count()):
        why_not = support.device_problem(index)
        device: dict[str, Any] = {"index": index, "runs": why_not is None, "why_not": why_not}
        try:
            props = support.device_props(index)
        except Exception:  # why_not has the text
            devices.append(device)
            continue
        device |= {
            "name": props.name,
            "capability": f"{props.major}.{props.minor}",
            "multiprocessors": props.sm_count,
            "driver": props.driver_version,
        }
        devices.append(device)
    return devices


_TENSORS = "float32 (ieee, tf32), float16, bfloat16"


def _runs(what: str, missing: str | None = None) -> str:
    """What the kernels of an operator take, or why none runs."""
    if native().binding is None:
        missing = "the native library is not loaded"
    return f"plain torch chains: {missing}" if missing else what


def _operators() -> dict[str, str]:
    missing = None if native().binding is None else support.conv_missing()
    return {
        "conv2d": _runs(f"{_TENSORS}, any program", missing),
        "conv_transpose2d": _runs(f"{_TENSORS}, any program", missing),
        "conv2d_batch_norm": _runs(f"{_TENSORS}, any programs, training and evaluation", missing),
        "linear": _runs(f"{_TENSORS}, any program"),
        "linear_batch_norm": _runs(f"{_TENSORS}, any programs, training and evaluation"),
        "linear_logsumexp": _runs(f"{_TENSORS}, any program; also behind Linear and sigmoid"),
        "logsumexp": _runs("float32, float16, bfloat16; any dimensions and strides"),
    }


def collect() -> dict[str, Any]:
    """Everything `info` prints, as JSON values. Creates no CUDA context.

    Examples
    --------
    >>> sorted(collect())
    ['devices', 'library', 'machine', 'operators', 'pycutfuse', 'python', 'torch']
    """
    return {
        "pycutfuse": pycutfuse.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
        "library": _library(),
        "devices": _devices(),
        "operators": _operators(),
    }


def render(info: dict[str, Any]) -> str:
    """`collect`'s result as text."""
    library = info["library"]
    lines = [
        f"pycutfuse {info['pycutfuse']}, Python {info['python']} ({info['machine']}), "
        f"torch {info['torch']['version']} (CUDA {info['torch']['cuda'] or 'none'})"
    ]
    if library["loaded"]:
        lines.append(f"{LIBRARY_NAME} {library['version']}, ABI {library['abi']}")
        lines.append(f"  built with {library['build']}")
        lines.append(f"  {len(library['policies'])} policies:")
        lines += [f"    {policy}" for policy in library["policies"]]
        lines.append(f"  {len(library['conv_policies'])} convolution policies:")
        lines += [f"    {policy}" for policy in library["conv_policies"]]
        lines.append(f"  {library['note']}")
        lines += [f"  binding and package disagree on {name}" for name in library["disagrees"]]
    else:
        lines.append(f"{LIBRARY_NAME} not loaded: {library['diagnosis']}")
        lines.append("  the plain torch chains run instead")
    if not info["devices"]:
        lines.append("no CUDA device: the plain torch chains run")
    for device in info["devices"]:
        name = f"cuda:{device['index']}"
        if "name" in device:
            name += f" {device['name']} (sm_{device['capability'].replace('.', '')})"
        lines.append(
            f"{name}: {'runs' if device['runs'] else 'does not run: ' + device['why_not']}"
        )
    lines += [f"{name}: {what}" for name, what in info["operators"].items()]
    return "\n".join(lines)


def main(*, as_json: bool) -> int:
    """Print the information; returns the exit status."""
    info = collect()
    print(json.dumps(info, indent=2) if as_json else render(info))
    return 0
