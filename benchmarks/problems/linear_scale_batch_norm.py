"""Founding problem 3: Linear, per-feature scale, BatchNorm1d."""

import torch
from torch import nn

import pycutfuse as pcf

BATCH, IN_FEATURES, OUT_FEATURES = 16384, 4096, 4096  # and once more with 1024, 8192, 8192


class Model(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)


ModelNew = pcf.nn.LinearScaleBatchNorm1d


def get_inputs():
    return [torch.rand(BATCH, IN_FEATURES)]


def get_init_inputs():
    return [IN_FEATURES, OUT_FEATURES, (OUT_FEATURES,)]
