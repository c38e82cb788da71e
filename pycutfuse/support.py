"""The one predicate: which problems libcutfuse runs on which GPU. Thin callers of the C++."""

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pycutfuse._knobs import knobs
from pycutfuse._loader import native
from pycutfuse.program import library_codes

if TYPE_CHECKING:
    from pycutfuse._C import DeviceProps, FusedProblem, GemmPolicy, Plan, Program
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
