"""The plain torch chain of each operator: the definition of correct, and what a fallback runs."""

from pycutfuse.reference.linear import linear
from pycutfuse.reference.linear_batch_norm import batch_norm, linear_batch_norm, update_factor
from pycutfuse.reference.program import apply_program
from pycutfuse.reference.program_vjp import program_vjp, reads_value

__all__ = [
    "apply_program",
    "batch_norm",
    "linear",
    "linear_batch_norm",
    "program_vjp",
    "reads_value",
    "update_factor",
]
