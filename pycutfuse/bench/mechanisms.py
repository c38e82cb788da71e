"""Which mechanism runs which convolution, as the library itself selects, in a table for README.

``python -m pycutfuse.bench.mechanisms README.md`` writes it there. No GPU is needed: plans are made
for the properties of one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pycutfuse import support
from pycutfuse._console import guarded
from pycutfuse._loader import native
from pycutfuse.bench.report import update_region
from pycutfuse.bench.shapes import ConvShape
from pycutfuse.bench.tables import Table
from pycutfuse.geometry import memory_format
from pycutfuse.ops import _conv, _conv_call, _conv_launch

OK, STALE, USAGE = 0, 1, 2
SECTION = "mechanisms"
TITLE = "What runs a convolution on an H200; batch, channels and sides of x, then channels of out"
FASTER, NOT_TAKEN = "PyTorch (faster)", "PyTorch (not taken)"


@dataclass(frozen=True)
class Kind:
    """A column: dtype, memory format and, of float32, the tier."""

    title: str
    dtype: torch.dtype = torch.float32
    tier: str = "tf32"
    channels_last: bool = False


KINDS = (
    Kind("fp32 NCHW, TF32 on"),
    Kind("fp32 NCHW, TF32 off", tier="ieee"),
    Kind("fp32 channels_last, TF32 on", channels_last=True),
    Kind("fp32 channels_last, TF32 off", tier="ieee", channels_last=True),
    Kind("bf16 NCHW", torch.bfloat16),
    Kind("bf16 channels_last", torch.bfloat16, channels_last=True),
)

SHAPES = {
    "first layer, 7x7 stride 2": ConvShape(64, 3, 224, 224, 64, 7, 2, 3),
    "first layer, 11x11 stride 4": ConvShape(256, 3, 224, 224, 96, 11, 4, 2),
    "first layer, 5x5 stride 2": ConvShape(16, 3, 300, 300, 72, 5, 2),
    "3x3, few channels": ConvShape(128, 8, 128, 128, 64, 3, 1, 1),
    "3x3": ConvShape(64, 64, 56, 56, 64, 3, 1, 1),
    "3x3, many channels": ConvShape(64, 512, 14, 14, 512, 3, 1, 1),
    "3x3 stride 2": ConvShape(64, 128, 56, 56, 128, 3, 2, 1),
    "3x3 dilation 2": ConvShape(64, 64, 56, 56, 64, 3, 1, 2, dilation=2),
    "3x3, 32 groups": ConvShape(64, 128, 56, 56, 128, 3, 1, 1, groups=32),
    "3x3 depthwise": ConvShape(64, 128, 56, 56, 128, 3, 1, 1, groups=128),
    "1x1": ConvShape(64, 64, 56, 56, 256, 1),
    "1x1, many channels": ConvShape(64, 1024, 14, 14, 512, 1),
    "1x1 stride 2": ConvShape(64, 256, 56, 56, 512, 1, 2),
    "transposed 3x3": ConvShape(8, 32, 512, 1024, 32, 3, transposed=True),
    "transposed 4x4 stride 2": ConvShape(16, 128, 64, 64, 64, 4, 2, 1, transposed=True),
    "transposed 2x2 stride 2": ConvShape(16, 128, 64, 64, 64, 2, 2, transposed=True),
}


def problem(shape: ConvShape, kind: Kind) -> support.ConvProblem:
    """What the library is asked for a call without a bias; no tensor is made."""
    groups = shape.groups
    sizes = (shape.out_channels, shape.channels // groups)
    if shape.transposed:
        sizes = (shape.channels, shape.out_channels // groups)
    layout = torch.channels_last if kind.channels_last else torch.contiguous_format
    x, weight = (
        torch.empty(size, dtype=kind.dtype, device="meta", memory_format=layout)
        for size in (shape.input_size, (*sizes, shape.kernel, shape.kernel))
    )
    options: dict[str, Any] = {"stride": shape.stride, "padding": shape.padding}
    options |= {"dilation": shape.dilation, "groups": groups}
    prepare: Any = _conv.prepare_conv2d
    if shape.transposed:
        prepare = _conv.prepare_conv_transpose2d
        options["output_padding"] = shape.output_padding
    call = prepare(x, weight, **options)
    last = memory_format(x, weight, call.geometry) is torch.channels_last
    return _conv_launch._problem(call, _conv_call.check(call), kind.tier, last)


def selected(shape: ConvShape, kind: Kind) -> str:
    """The mechanism of a call, in its plan's words, or why PyTorch runs it."""
    binding, made = native().binding, support.conv_problem(problem(shape, kind))
    device = binding.DeviceProps(major=9, minor=0, sm_count=132)
    if binding.conv_why_not(made, device) is not None:
        return NOT_TAKEN
    if binding.conv_why_slower(made, device) is not None:
        return FASTER
    return support.conv_mechanism(binding.make_conv_plan(made, device, None))


def table() -> Table:
    """One row for each of `SHAPES`, one column for each of `KINDS`."""
    columns = ["convolution", "sizes", *(kind.title for kind in KINDS)]
    rows = []
    for name, shape in SHAPES.items():
        image = "x".join(map(str, shape.input_size))
        cells = [selected(shape, kind) for kind in KINDS]
        rows.append([name, f"{image}-{shape.out_channels}", *cells])
    return Table(TITLE, columns, rows)


def updated(document: str) -> str:
    """`document` with the table between its markers, see `update_region`."""
    words = table().markdown().replace("---:", "---")  # aligned as words are
    return update_region(document, words, SECTION)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 1 for --check and another table."""
    return guarded(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycutfuse.bench.mechanisms",
        description="Write which mechanism runs which convolution between <!-- results:begin "
        f"{SECTION} --> and <!-- results:end {SECTION} --> of FILE. No GPU is needed.",
    )
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if it differs")
    given = parser.parse_args(arguments)
    missing = native().diagnosis or support.conv_missing()
    if missing is not None:
        print(f"pycutfuse: {missing}", file=sys.stderr)
        return USAGE
    try:
        old = given.file.read_bytes().decode()
        new = updated(old)
        if new != old and not given.check:
            given.file.write_bytes(new.encode())
    except (OSError, ValueError) as error:
        print(f"pycutfuse: {given.file}: {error}", file=sys.stderr)
        return USAGE
    if given.check and new != old:
        print(
            f"pycutfuse: {given.file}: another table; without --check it is written",
            file=sys.stderr,
        )
        return STALE
    return OK


if __name__ == "__main__":
    sys.exit(main())
