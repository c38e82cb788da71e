"""Functional API. Each operator is opaque to torch.compile and differentiable once."""

from pycutfuse.ops._conv import conv2d, conv_transpose2d
from pycutfuse.ops._conv_batch_norm import conv2d_batch_norm
from pycutfuse.ops._linear import linear
from pycutfuse.ops._linear_batch_norm import linear_batch_norm
from pycutfuse.ops._linear_logsumexp import linear_logsumexp
from pycutfuse.ops._logsumexp import logsumexp

__all__ = [
    "conv2d",
    "conv2d_batch_norm",
    "conv_transpose2d",
    "linear",
    "linear_batch_norm",
    "linear_logsumexp",
    "logsumexp",
]
