"""Import costs little beyond torch, touches no GPU, and loads nothing that is not used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pycutfuse as pcf

TIME = """
import sys, time
begin = time.process_time()  # other tests run beside it
import torch
before = set(sys.modules)
middle = time.process_time()
import pycutfuse
print((time.process_time() - middle) / (middle - begin))
print(torch.cuda.is_initialized())
print(sorted(name for name in set(sys.modules) - before if name.startswith("pycutfuse")))
"""


LIMIT = 0.05  # of the time that torch takes to import: 50 ms where that is a second


def python(code: str, **variables: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | variables,
    )
    return run.stdout.strip().splitlines()


def quickest(code: str, **variables: str) -> float:
    """The least share of torch's time in some runs, or that of the first that is quick enough."""
    least = float("inf")
    for _ in range(8):
        least = min(least, float(python(code, **variables)[0]))
        if least < LIMIT:
            break
    return least


def test_import_is_quick_and_lazy() -> None:
    assert quickest(TIME) < LIMIT
    runs = [python(TIME) for _ in range(2)]
    assert all(run[1] == "False" for run in runs)
    assert runs[0][2] == "['pycutfuse']"


def test_using_modules_is_quick_too(tmp_path: Path) -> None:
    # Registration of the operators and the modules count as import, though they come later.
    code = TIME.replace("import pycutfuse\n", "import pycutfuse\npycutfuse.nn, pycutfuse.ops\n")
    # From bytecode, as installed: the first run writes it, whatever this process is told.
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    assert quickest(code, **bytecode) < LIMIT


FIRST = """
import torch, pycutfuse
from torch._subclasses import FakeTensorMode
x, weight = torch.rand(5, 6), torch.rand(4, 6)
def call(weight):
    return pycutfuse.ops.linear(x, weight)
class Model(torch.nn.Module):
    def forward(self, weight):
        return call(weight)
{first}
from pycutfuse.ops import _memo
print(_memo.Memo.trusted, {{type(one) for one in _memo.ABSENT}} == {{torch.Tensor}})
"""


@pytest.mark.parametrize(
    "first",
    [
        "torch.func.grad(lambda weight: call(weight).sum())(weight)",
        "torch.func.vmap(call)(weight.expand(2, 4, 6))",
        "torch.func.jvp(call, (weight,), (weight,))",
        "assert len(torch.export.export(Model(), (weight,)).graph.nodes) < 9",
        "with FakeTensorMode(): pycutfuse.nn",
        "with torch.inference_mode(): pycutfuse.nn",
        "torch.set_default_dtype(torch.float64); pycutfuse.nn",
    ],
    ids="grad vmap jvp export fake inference float64".split(),
)
def test_the_first_use_may_be_under_any_mode(first: str) -> None:
    assert python(FIRST.format(first=first)) == ["True True"]


@pytest.mark.cuda
def test_info_and_import_create_no_context() -> None:
    code = """
import torch, pycutfuse
from pycutfuse import info
found = info.collect()
print(torch.cuda.is_initialized(), found["devices"][0]["runs"])
"""
    assert python(code) == ["False True"]


@pytest.mark.parametrize("name", pcf.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(pcf, name) is not None
    assert name in dir(pcf)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'conv9d'"):
        pcf.conv9d  # noqa: B018


def test_info_on_the_command_line() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pycutfuse", "info", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(run.stdout)
    assert found["pycutfuse"] == pcf.__version__
    assert found["library"]["loaded"] or found["library"]["diagnosis"]
    assert not found["library"].get("disagrees")
    text = subprocess.run(
        [sys.executable, "-m", "pycutfuse", "info"], capture_output=True, text=True, check=True
    ).stdout
    assert "libcutfuse.so" in text


def test_a_wrong_command_says_what_there_is() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pycutfuse", "nothing"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    for word in ("info", "bench", "verify"):
        assert word in run.stderr
