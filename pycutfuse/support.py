"""The one predicate: which problems libcutfuse runs on which GPU. Thin callers of the C++."""

from functools import lru_cache
from typing import TYPE_CHECKING

from pycutfuse._loader import native

if TYPE_CHECKING:
    from pycutfuse._C import DeviceProps, GemmPolicy, Plan, Program
    from pycutfuse.program import Encoded


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
    made: Program = native().binding.Program(program.codes, program.constants)
    return made


def why_not(
    m: int, n: int, k: int, program: "Encoded", tail: str, after: "Encoded", index: int
) -> str | None:
    """Say why no kernel takes the problem on CUDA device `index`, or None if one does.

    Parameters
    ----------
    m, n, k : int
        Rows of x, rows of weight, and the reduced size.
    program, after : Encoded
        Steps before and after the tail.
    tail : {"none", "batch_norm_train", "batch_norm_eval"}
    index : int
        CUDA ordinal, for which `device_problem` is None.
    """
    binding = native().binding
    reason: str | None = binding.why_not(
        m,
        n,
        k,
        compile_program(program),
        binding.TAILS[tail],
        compile_program(after),
        device_props(index),
    )
    return reason


def make_plan(
    m: int,
    n: int,
    k: int,
    program: "Encoded",
    tail: str,
    after: "Encoded",
    frozen: bool,
    index: int,
    policy: "GemmPolicy | None",
) -> "Plan":
    """Plan a problem that `why_not` accepts; `policy` replaces the selected one."""
    binding = native().binding
    plan: Plan = binding.make_plan(
        m,
        n,
        k,
        compile_program(program),
        binding.TAILS[tail],
        compile_program(after),
        frozen,
        device_props(index),
        policy,
    )
    return plan
