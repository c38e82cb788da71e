"""The plain torch chain of each operator: the definition of correct, and what a fallback runs."""

from pycutfuse.reference.conv import (
    conv2d,
    conv2d_batch_norm,
    conv_transpose2d,
    convolution,
)
from pycutfuse.reference.linear import linear
from pycutfuse.reference.linear_batch_norm import batch_norm, linear_batch_norm, update_factor
from pycutfuse.reference.linear_logsumexp import linear_linear_logsumexp, linear_logsumexp
from pycutfuse.reference.logsumexp import logsumexp
from pycutfuse.reference.program import apply_program
from pycutfuse.reference.program_vjp import program_vjp, read_operands, reads_value

__all__ = [
    "apply_program",
    "batch_norm",
    "conv2d",
    "conv2d_batch_norm",
    "conv_transpose2d",
    "convolution",
    "linear",
    "linear_batch_norm",
    "linear_linear_logsumexp",
    "linear_logsumexp",
    "logsumexp",
    "program_vjp",
    "read_operands",
    "reads_value",
    "update_factor",
]
