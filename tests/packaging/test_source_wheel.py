"""`pip install .` with nvcc: the library, the binding and the notices are in the wheel and work."""

import os
import shutil
from pathlib import Path

import pytest

from .building import NVCC, ROOT, build_wheel, python_in, unpack


@pytest.mark.skipif(NVCC is None, reason="no nvcc: CUDA's compiler is needed for the kernels")
def test_wheel_from_source(tmp_path: Path) -> None:
    defines = ["CUTFUSE_NATIVE=ON", "CUTFUSE_DEV_KERNELS=ON"]
    environment = dict(os.environ)
    # What `make build` has compiled, with the same headers, comes from ccache.
    cutlass = ROOT / "build/release/third_party/cutlass/files/cutlass_library/source"
    if shutil.which("ccache") and cutlass.is_dir():
        defines.append(f"CUTFUSE_CUTLASS_DIR={cutlass}")
        for language in ("CXX", "CUDA"):
            environment[f"CMAKE_{language}_COMPILER_LAUNCHER"] = "ccache"
    wheel = build_wheel(tmp_path / "wheel", environment, *defines, build="source-wheel")
    names = unpack(wheel, tmp_path / "site")
    assert "pycutfuse/libcutfuse.so" in names
    assert len([name for name in names if name.startswith("pycutfuse/_C.")]) == 2  # .so and .pyi
    for part in ("LICENSE", "third_party/cutlass/LICENSE.txt", "third_party/pybind11/LICENSE.txt"):
        assert [name for name in names if name.endswith(f".dist-info/licenses/{part}")], part
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "cpp"))]

    code = "from pycutfuse import _C; print(len(_C.compiled_policies()), _C.build_info())"
    result = python_in(tmp_path / "site", code)
    assert result.returncode == 0, result.stderr
    count, information = result.stdout.split(maxsplit=1)
    assert int(count) >= 2
    assert "sm_90a" in information
