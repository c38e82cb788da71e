"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

import pycutfuse
import pycutfuse.nn

SKIP = ("pycutfuse.bench", "pycutfuse.__main__", "pycutfuse._C", "pycutfuse.libcutfuse")
MODULES = [
    module.name
    for module in pkgutil.walk_packages(pycutfuse.__path__, "pycutfuse.")
    if not module.name.startswith(SKIP)
]
# Their users see them, so each has an example.
PUBLIC = (pycutfuse.ops.linear, pycutfuse.ops.linear_batch_norm, pycutfuse.ops.logsumexp)
PUBLIC += (pycutfuse.nn.Linear, pycutfuse.ops.linear_logsumexp, pycutfuse.nn.LinearLogSumExp)
PUBLIC += (pycutfuse.nn.LinearSigmoidLinearLogSumExp,)
PUBLIC += (pycutfuse.ops.conv2d, pycutfuse.ops.conv_transpose2d, pycutfuse.ops.conv2d_batch_norm)
PUBLIC += (pycutfuse.nn.Conv2d, pycutfuse.nn.ConvTranspose2d, pycutfuse.nn.Conv2dBatchNorm2dScale)
PUBLIC += (pycutfuse.nn.LinearScaleBatchNorm1d, pycutfuse.explain, pycutfuse.freeze)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


@pytest.mark.parametrize("what", PUBLIC, ids=lambda what: what.__name__)
def test_public_functions_have_examples(what: object) -> None:
    assert ">>>" in (what.__doc__ or "")
