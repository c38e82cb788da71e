"""The one predicate: which problems libcutfuse runs on which GPU. Thin callers of the C++."""

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pycutfuse._knobs import knobs
from pycutfuse._loader import native
from pycutfuse.program import library_codes

if TYPE_CHECKING:
    from pycutfuse._C import (
        ConvPlan,
        ConvPolicy,
        DeviceProps,
        FusedProblem,
        GemmPolicy,
        Plan,
        Program,
    )
    from pycutfuse._C import ConvProblem as LibraryConvProblem
    from pycutfuse.program import Encoded

# include/cutfuse/types.h. The numbers are part of the binary interface.
DTYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
PRECISIONS: dict[str, int] = {"ieee": 0, "tf32": 1}


def dtype_code(dtype: torch.dtype) -> int:
    """The library's number of a dtype that it has."""
    return DTYPES[dtype]


def precision_code(tier: str) -> int:
    """The library's number of a tier that it runs."""
    return PRECISIONS[tier]


def plane_count(dtype: torch.dtype, tier: str) -> int:
    """Planes of each operand, as plane_count() of include/cutfuse/gemm.h."""
    if dtype is not torch.float32:
        return 0
    return 2 if tier == "ieee" else 1


class Problem(NamedTuple):
    """What a plan depends on."""

    m: int  # rows of x
    n: int  # rows of weight
    k: int  # the reduced size
    program: "Encoded"
    tail: str  # "none", "batch_norm_train", "batch_norm_eval" or "logsumexp"
    after: "Encoded"
    tier: str  # of float32; "ieee" for the others
    dtype: torch.dtype  # of x, weight and the result
    frozen: bool  # the caller brings planes of the weight
    x_leading: int  # elements between rows, 0 for float32
    weight_leading: int
    ordinal: int  # of the CUDA device, for which `device_problem` is None

    @property
    def key(self) -> tuple[Any, ...]:
        """For caches; see `Encoded.key`."""
        return (*self[:3], self.program.key, self.tail, self.after.key, *self[6:])


class ConvProblem(NamedTuple):
    """What a plan of a convolution depends on; names as in `pycutfuse.geometry.Geometry`."""

    batch: int
    channels: int
    height: int
    width: int
    out_channels: int
    kernel_h: int
    kernel_w: int
    stride_h: int
    stride_w: int
    pad_h: int  # above; what is padded below follows from out_h
    pad_w: int
    dilation_h: int
    dilation_w: int
    groups: int
    out_h: int
    out_w: int
    transposed: bool
    program: "Encoded"  # the bias first, if there is one
    tail: str  # "none", "batch_norm_train" or "batch_norm_eval"
    after: "Encoded"
    tier: str  # of float32; "ieee" for the others
    dtype: torch.dtype
    packed: bool  # the caller brings the weight in the plan's own form
    channels_last: bool  # layout of the result
    pixel_stride: int  # of x, if pixels may be multiplied as a matrix, else 0
    ordinal: int  # of the CUDA device, for which `device_problem` is None

    @property
    def key(self) -> tuple[Any, ...]:
        """For caches; see `Encoded.key`."""
        return (*self[:17], self.program.key, self.tail, self.after.key, *self[20:])


@lru_cache(maxsize=64)
def device_props(index: int) -> "DeviceProps":
    """Properties of CUDA device `index`; creates no context. Raises what the binding raises."""
    props: DeviceProps = native().binding.query_device(index)
    return props


@lru_cache(maxsize=64)
def device_problem(index: int) -> str | None:
    """Say why no kernel can run on CUDA device `index` (-1: no GPU), or None. Never raises."""
    if index < 0:
        return "cpu tensors"
    loaded = native()
    if loaded.binding is None:
        return loaded.diagnosis
    try:
        problem: str | None = loaded.binding.check_device(device_props(index))
    except Exception as error:  # the driver is missing or too old: the binding says which
        return str(error)
    return problem


def compile_program(program: "Encoded") -> "Program":
    """Build the library's form of `program`."""
    codes = library_codes(program.codes)
    made: Program = native().binding.Program(codes, program.constants)
    return made


def fused_problem(problem: Problem) -> "FusedProblem":
    """Build the library's form of `problem`."""
    binding = native().binding
    made: FusedProblem = binding.FusedProblem(
        *problem[:3],
        compile_program(problem.program),
        binding.TAILS[problem.tail],
        compile_program(problem.after),
        precision_code(problem.tier),
        dtype_code(problem.dtype),
        *problem[8:11],
    )
    return made


def why_not(problem: Problem) -> str | None:
    """Say why no kernel takes the problem on its device, or None if one does."""
    binding = native().binding
    reason: str | None = binding.why_not(fused_problem(problem), device_props(problem.ordinal))
    return reason


def why_slower(*problems: Problem) -> str | None:
    """Say why PyTorch is expected to run every one of `problems` faster, or None."""
    if knobs.take_slow or knobs.policy is not None:
        return None
    binding = native().binding
    reason: str | None = None
    for problem in problems:
        reason = binding.why_slower(fused_problem(problem), device_props(problem.ordinal))
        if reason is None:
            return None
    return reason


def make_plan(problem: Problem, policy: "GemmPolicy | None" = None) -> "Plan":
    """Plan a problem that `why_not` accepts; `policy` replaces the selected one."""
    binding = native().binding
    props = device_props(problem.ordinal)
    plan: Plan = binding.make_plan(fused_problem(problem), props, policy)
    return plan


def conv_missing() -> str | None:
    """Say that the loaded library is older than convolutions, or None."""
    if hasattr(native().binding, "make_conv_plan"):
        return None
    return "the native library has no convolutions; build it again"


def conv_problem(problem: ConvProblem) -> "LibraryConvProblem":
    """Build the library's form of `problem`."""
    binding = native().binding
    made: LibraryConvProblem = binding.ConvProblem(
        *problem[:17],
        compile_program(problem.program),
        binding.TAILS[problem.tail],
        compile_program(problem.after),
        precision_code(problem.tier),
        dtype_code(problem.dtype),
        *problem[22:25],
    )
    return made


def conv_why_not(problem: ConvProblem) -> str | None:
    """Say why no kernel takes the problem on its device, or None if one does.

    Where a policy is forced, its plan says what it does not take: it may take what none does that
    is selected.
    """
    if knobs.conv_policy is not None:
        return None
    props = device_props(problem.ordinal)
    reason: str | None = native().binding.conv_why_not(conv_problem(problem), props)
    return reason


def conv_why_slower(problem: ConvProblem) -> str | None:
    """Say why PyTorch is expected to run the problem faster, or None."""
    if knobs.take_slow or knobs.conv_policy is not None:
        return None
    props = device_props(problem.ordinal)
    reason: str | None = native().binding.conv_why_slower(conv_problem(problem), props)
    return reason


def make_conv_plan(problem: ConvProblem, policy: "ConvPolicy | None" = None) -> "ConvPlan":
    """Plan a problem that `conv_why_not` accepts; `policy` replaces the selected one."""
    props = device_props(problem.ordinal)
    plan: ConvPlan = native().binding.make_conv_plan(conv_problem(problem), props, policy)
    return plan


def conv_mechanism(plan: "ConvPlan") -> str:
    """Say in a few of its own words by which mechanism a plan convolves.

    A plan's description has one line on the convolution: its sizes, then how it is computed.
    """
    lines = plan.describe().splitlines()
    found = [line for line in lines if line.startswith(("convolution ", "transposed convolution "))]
    words = (found or lines)[0].split(": ", 1)[-1].removeprefix(f"{plan.policy!r}, ")
    return words.split(",")[0].removesuffix(" to NCHW").removesuffix(" to channels_last")
