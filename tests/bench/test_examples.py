"""The examples in docstrings of the benchmark are true."""

import doctest
import importlib
import pkgutil

import pytest

from pycutfuse import bench

MODULES = [module.name for module in pkgutil.iter_modules(bench.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(f"pycutfuse.bench.{name}")
    assert doctest.testmod(module).failed == 0
