"""A damaged, foreign or mismatched library gives a diagnosis, never a dead process."""

import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import pycutfuse
from pycutfuse import _loader

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
# Any complete shared object serves as the one to damage.
GENUINE = Path(next(p for p in sys.modules["torch"].__path__)) / "lib" / "libshm.so"

CHILD = """
import sys
sys.path.insert(0, {path!r})
import torch, pycutfuse as pcf
from pycutfuse import _loader
pcf.set_fallback_policy({policy!r})
print(_loader.native().diagnosis)
x = torch.ones(2, 3)
layer = pcf.nn.Linear(3, 4)
assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
print("alive")
"""


def install(folder: Path, **files: bytes) -> Path:
    """A copy of the package without its shared objects, and with `files` in their place."""
    source = Path(pycutfuse.__file__).parent
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "bench")
    shutil.copytree(source, folder / "pycutfuse", ignore=ignore)
    for name, content in files.items():
        path = f"_C{SUFFIX}" if name == "binding" else _loader.LIBRARY_NAME
        (folder / "pycutfuse" / path).write_bytes(content)
    return folder


def run(folder: Path, policy: str = "silent") -> subprocess.CompletedProcess[str]:
    code = CHILD.format(path=str(folder), policy=policy)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=folder
    )


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ("not built", "nvcc", "pip -Ccmake.define.CUTFUSE_PREBUILT_DIR=<folder of")),
        ({"binding": b""}, ("no ELF header",)),
        ({"binding": b"not a library at all" * 10}, ("no ELF header",)),
        ({"binding": GENUINE.read_bytes()[:4096]}, ("truncated", "4096 bytes")),
        ({"binding": GENUINE.read_bytes()}, ("did not load",)),
        (
            {"binding": GENUINE.read_bytes(), "library": GENUINE.read_bytes()[:-1000]},
            ("libcutfuse.so", "truncated"),
        ),
    ],
    ids=["missing", "empty", "text", "truncated", "foreign", "truncated_library"],
)
def test_damaged_files(tmp_path: Path, files: dict[str, bytes], words: tuple[str, ...]) -> None:
    result = run(install(tmp_path, **files))
    assert result.returncode == 0, result.stderr
    diagnosis, alive = result.stdout.strip().splitlines()
    assert alive == "alive"
    for word in words:
        assert word in diagnosis
    assert "Rebuild" in diagnosis


def test_every_truncation_is_seen(tmp_path: Path) -> None:
    whole = GENUINE.read_bytes()
    path = tmp_path / "lib.so"
    path.write_bytes(whole)
    assert _loader.elf_problem(path) is None
    for length in (*range(0, 128, 7), *range(128, len(whole), max(len(whole) // 40, 1))):
        path.write_bytes(whole[:length])
        assert _loader.elf_problem(path) is not None, length


def test_another_processor_is_named(tmp_path: Path) -> None:
    content = bytearray(GENUINE.read_bytes())
    content[18:20] = (243).to_bytes(2, "little")  # RISC-V
    path = tmp_path / "lib.so"
    path.write_bytes(content)
    assert "another processor" in str(_loader.elf_problem(path))
    assert platform.machine() in _loader._MACHINES, "name this machine's ELF number in _loader"


def test_a_binding_for_another_python_is_named(tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / "pycutfuse" / "_C.cpython-27-x86_64-linux-gnu.so").write_bytes(b"")
    diagnosis = _loader.inspect_files(tmp_path / "pycutfuse")
    assert "cpython-27" in str(diagnosis)
    assert str(sys.implementation.cache_tag) in str(diagnosis)


def fake(**changes: object) -> ModuleType:
    members = dict.fromkeys(_loader.INTERFACE, lambda: None)
    members |= {"ABI_VERSION": 1, "abi_version": lambda: 1, "__name__": "_C"} | changes
    return SimpleNamespace(**{k: v for k, v in members.items() if v is not ...})


def test_an_abi_mismatch_is_refused() -> None:
    assert _loader.inspect_binding(fake()).diagnosis is None
    found = _loader.inspect_binding(fake(abi_version=lambda: 7))
    assert found.binding is None
    assert "ABI 7" in str(found.diagnosis)
    assert "ABI 1" in str(found.diagnosis)


def test_a_binding_of_another_version_is_refused() -> None:
    found = _loader.inspect_binding(fake(make_plan=...))
    assert found.missing == ("make_plan",)
    assert "make_plan" in str(found.diagnosis)


def test_the_interface_is_the_one_of_the_stub() -> None:
    stub = (Path(pycutfuse.__file__).parent / "_C.pyi").read_text()
    for name in _loader.INTERFACE:
        assert f"def {name}(" in stub or f"class {name}" in stub or f"\n{name}:" in stub, name


@pytest.mark.cuda
def test_without_a_library_cuda_tensors_fall_back(
    cuda: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from pycutfuse import support
    from pycutfuse.ops import _launch

    monkeypatch.setattr(support, "native", lambda: _loader.Native(None, "not there"))
    support.device_problem.cache_clear()
    _launch.clear_caches()
    try:
        layer = pycutfuse.nn.Linear(3, 4, device="cuda")
        x = torch.ones(2, 3, device="cuda")
        expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
        assert torch.equal(layer(x), expected)
        assert pycutfuse.counters()["fallback"] == {"linear: not there": 1}
        assert pycutfuse.freeze(layer.eval()).frozen is False
    finally:
        support.device_problem.cache_clear()
        _launch.clear_caches()
