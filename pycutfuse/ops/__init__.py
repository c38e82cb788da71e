"""Functional API. Each operator is opaque to torch.compile and differentiable once."""

from pycutfuse.ops._linear import linear
from pycutfuse.ops._linear_batch_norm import linear_batch_norm

__all__ = ["linear", "linear_batch_norm"]
