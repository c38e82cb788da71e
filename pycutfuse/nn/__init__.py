"""Modules: torch's constructors, parameters and state_dict, with fused forwards."""

from pycutfuse.nn.conv import Conv2d, ConvTranspose2d
from pycutfuse.nn.conv2d_batch_norm2d_scale import Conv2dBatchNorm2dScale
from pycutfuse.nn.linear import Linear
from pycutfuse.nn.linear_logsumexp import LinearLogSumExp
from pycutfuse.nn.linear_scale_batch_norm import LinearScaleBatchNorm1d
from pycutfuse.nn.linear_sigmoid_linear_logsumexp import LinearSigmoidLinearLogSumExp

__all__ = [
    "Conv2d",
    "Conv2dBatchNorm2dScale",
    "ConvTranspose2d",
    "Linear",
    "LinearLogSumExp",
    "LinearScaleBatchNorm1d",
    "LinearSigmoidLinearLogSumExp",
]
