"""`pip install .` with nvcc: the library, the binding and the notices are in the wheel and work."""

import os
import shutil
from pathlib import Path

import pytest

from .building import NVCC, ROOT, build_folder, build_wheel, python_in, unpack


@pytest.mark.skipif(NVCC is None, reason="no nvcc: CUDA's compiler is needed for the kernels")
def test_wheel_from_source(tmp_path: Path) -> None:
    defines = ["CUTFUSE_NATIVE=ON", "CUTFUSE_DEV_KERNELS=ON"]
    environment = dict(os.environ)
    build = build_folder("source-wheel")
    # What `make build` has compiled comes from ccache, which knows headers by their places seen
    # from the build folder.
    headers = ROOT / "build/release/third_party"
    if shutil.which("ccache") and headers.is_dir():
        build.mkdir(exist_ok=True)
        link = build / headers.name
        if not link.exists():
            link.symlink_to(headers)
        defines.append(f"CUTFUSE_CUTLASS_DIR={headers / 'cutlass/files/cutlass_library/source'}")
        environment.setdefault("CXX", "c++")  # as CMake has it, not Python
        for language in ("CXX", "CUDA"):
            environment[f"CMAKE_{language}_COMPILER_LAUNCHER"] = "ccache"
    wheel = build_wheel(tmp_path / "wheel", environment, *defines, build=build)
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
