"""Seeded configurations of the operators, each drawn from one integer, run and judged.

``python -m pycutfuse.testing.repro --seed N`` prints and checks one, ``--count M`` a range of them.
`judge` states the rules.
"""

from collections.abc import Callable

from pycutfuse.testing.repro.checking import FAILURES, VERDICTS, Outcome, check
from pycutfuse.testing.repro.config import Config
from pycutfuse.testing.repro.conv import ConvConfig
from pycutfuse.testing.repro.conv import draw as draw_conv
from pycutfuse.testing.repro.linear import LinearConfig
from pycutfuse.testing.repro.linear import draw as draw_linear
from pycutfuse.testing.repro.printing import source
from pycutfuse.testing.repro.steps import StepRecipe
from pycutfuse.testing.repro.tails import BatchNorm, LogSumExp
from pycutfuse.testing.repro.tensors import TensorRecipe

Draw = Callable[[int, int], Config]
# A family: its configurations, drawn from a seed and a limit of M * N * K.
FAMILIES: dict[str, Draw] = {"linear": draw_linear, "conv": draw_conv}

__all__ = [
    "FAILURES",
    "FAMILIES",
    "VERDICTS",
    "BatchNorm",
    "ConvConfig",
    "LinearConfig",
    "LogSumExp",
    "Outcome",
    "StepRecipe",
    "TensorRecipe",
    "check",
    "draw_conv",
    "draw_linear",
    "source",
]
