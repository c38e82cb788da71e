"""Founding problem 5: Linear, sigmoid, Linear, logsumexp over features."""

import torch
from torch import nn

import pycutfuse as pcf


class Model(nn.Module):
    def __init__(self, input_size, hidden_size, output_size):
        super().__init__()
        self.linear1 = nn.Linear(input_size, hidden_size)
        self.linear2 = nn.Linear(hidden_size, output_size)

    def forward(self, x):
        return torch.logsumexp(self.linear2(torch.sigmoid(self.linear1(x))), dim=1)


ModelNew = pcf.nn.LinearSigmoidLinearLogSumExp


def get_inputs():
    return [torch.rand(16384, 2048)]


def get_init_inputs():
    return [2048, 4096, 1024]
