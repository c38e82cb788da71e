"""Modules: torch's constructors, parameters and state_dict, with fused forwards."""

from pycutfuse.nn.linear import Linear
from pycutfuse.nn.linear_scale_batch_norm import LinearScaleBatchNorm1d

__all__ = ["Linear", "LinearScaleBatchNorm1d"]
