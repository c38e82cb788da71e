"""Without nvcc the package is pure Python, works, and says what is missing and how to get it."""

from pathlib import Path

import pytest

from .building import build_wheel, configure, environment_without_nvcc, python_in, unpack


def test_configure_says_what_is_missing(tmp_path: Path) -> None:
    result = configure(tmp_path / "build", **environment_without_nvcc(tmp_path / "bin"))
    assert result.returncode == 0, result.stdout
    for text in ("No nvcc", "reference-only", "CUDA toolkit", "CUTFUSE_PREBUILT_DIR"):
        assert text in result.stdout


def test_required_kernels_are_an_error(tmp_path: Path) -> None:
    environment = environment_without_nvcc(tmp_path / "bin")
    result = configure(tmp_path / "build", "-DCUTFUSE_NATIVE=ON", **environment)
    assert result.returncode != 0
    assert "CUTFUSE_NATIVE=ON but there is no nvcc" in result.stdout


@pytest.mark.parametrize("value", ["on", "True", "yes", "1"])
def test_other_words_for_on_are_an_error_too(tmp_path: Path, value: str) -> None:
    environment = environment_without_nvcc(tmp_path / "bin")
    result = configure(tmp_path / "build", f"-DCUTFUSE_NATIVE={value}", **environment)
    assert result.returncode != 0
    assert "CUTFUSE_NATIVE=ON but there is no nvcc" in result.stdout


@pytest.mark.parametrize("value", ["off", "False", "no", "0"])
def test_other_words_for_off_compile_nothing(tmp_path: Path, value: str) -> None:
    result = configure(tmp_path / "build", f"-DCUTFUSE_NATIVE={value}")
    assert result.returncode == 0, result.stdout
    assert "CUTFUSE_NATIVE=OFF: reference-only package" in result.stdout


@pytest.mark.parametrize("value", ["OON", "", "sm_90"])
def test_a_choice_that_is_none_is_an_error(tmp_path: Path, value: str) -> None:
    result = configure(tmp_path / "build", f"-DCUTFUSE_NATIVE={value}")
    assert result.returncode != 0
    assert f'CUTFUSE_NATIVE is "{value}"; it must be AUTO, ON or OFF' in result.stdout


def test_wheel_runs_the_reference_path(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "wheel", environment_without_nvcc(tmp_path / "bin"))
    names = unpack(wheel, tmp_path / "site")
    assert not [name for name in names if name.endswith(".so")]
    assert {"pycutfuse/__init__.py", "pycutfuse/py.typed", "pycutfuse/_C.pyi"} <= names
    for part in ("LICENSE", "third_party/cutlass/LICENSE.txt", "third_party/cccl/LICENSE.txt"):
        assert [name for name in names if name.endswith(f".dist-info/licenses/{part}")], part
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "cpp"))]

    code = """
import torch, pycutfuse as pcf
from pycutfuse import _loader
layer = pcf.nn.Linear(3, 2, epilogue=(pcf.relu(),))
x = torch.rand(4, 3)
assert torch.equal(layer(x), torch.relu(torch.nn.functional.linear(x, layer.weight, layer.bias)))
print(_loader.native().diagnosis)
"""
    result = python_in(tmp_path / "site", code)
    assert result.returncode == 0, result.stderr
    assert "nvcc" in result.stdout
    assert "CUTFUSE_PREBUILT_DIR" in result.stdout
