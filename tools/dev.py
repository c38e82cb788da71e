"""The work behind the Makefile: set up an environment, build, test, benchmark, lint, format.

The environment is the active one (virtualenv or conda) if it has torch; otherwise `.venv` beside
this folder, made on first use, which sees the torch of the Python that made it if there is one.
Environment variables: CUTFUSE_TORCH, what pip installs into `.venv` when there is no torch
(default: the version that the tests are run with); CUTFUSE_PRESET, the CMake preset (default
release).
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036  (an older one reads this far and is told)
    sys.exit(
        f"pycutfuse needs Python 3.10 or newer, but {sys.executable} is "
        f"{sys.version.split()[0]}; name another one: make test PYTHON=python3.12"
    )

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
TORCH = os.environ.get("CUTFUSE_TORCH", "torch==2.13.0")
PRESET = os.environ.get("CUTFUSE_PRESET", "release")
CPP_SUFFIXES = {".h", ".cc", ".cu", ".cuh"}


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def show_and_run(*command: str | Path) -> int:
    words = [str(word) for word in command]
    line = shlex.join(words)
    print(f"$ {line if len(line) < 400 else line[:400] + ' ...'}", flush=True)
    return subprocess.run(words, cwd=ROOT).returncode


def run(*command: str | Path) -> None:
    """Run a command in the repository, shown; end with its status if it fails."""
    status = show_and_run(*command)
    if status != 0:
        sys.exit(status if status > 0 else 128 - status)


def has_module(python: str | Path, name: str) -> bool:
    """Whether `python` finds the module, without the seconds that importing torch takes."""
    code = f"import importlib.util as u; raise SystemExit(u.find_spec({name!r}) is None)"
    return subprocess.run([str(python), "-c", code], cwd="/").returncode == 0


def project() -> dict:
    """pyproject.toml; Python 3.10 has no tomllib, but pip carries the same parser."""
    try:
        import tomllib
    except ModuleNotFoundError:
        from pip._vendor import tomli as tomllib
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements() -> list[str]:
    """What building and testing need, as pyproject.toml pins it."""
    settings = project()
    extras = settings["project"]["optional-dependencies"]
    needed = [*settings["build-system"]["requires"], *extras["dev"]]
    for tool in ("cmake", "ninja"):
        if shutil.which(tool) is None:
            needed.append(f"{tool}{settings['tool']['scikit-build'][tool]['version']}")
    return needed


def check_torch(python: str | Path) -> None:
    """End with a remedy if the torch that `python` finds is older than the package asks for."""
    code = "import importlib.metadata as m; print(m.version('torch'))"
    asked = subprocess.run([str(python), "-c", code], cwd="/", capture_output=True, text=True)
    found = asked.stdout.strip()
    wanted = next(d for d in project()["project"]["dependencies"] if d.startswith("torch>="))
    least = wanted.removeprefix("torch>=")

    def number(version: str) -> list[int]:
        return [int(part) for part in version.split(".")[:2]]

    if asked.returncode == 0 and number(found) < number(least):
        sys.exit(
            f"pycutfuse needs {wanted}, but {python} has torch {found}; upgrade it, or run make "
            "with the Python of an environment without torch, to which it is installed"
        )


def active_environment_with_torch() -> bool:
    conda = os.environ.get("CONDA_PREFIX")
    active = sys.prefix != sys.base_prefix or (conda and Path(conda) == Path(sys.prefix))
    return bool(active) and has_module(sys.executable, "torch")


def make_venv() -> None:
    say("Making .venv")
    options = ["--system-site-packages"] if has_module(sys.executable, "torch") else []
    made = subprocess.run([sys.executable, "-m", "venv", *options, str(VENV)], cwd=ROOT)
    if made.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        sys.exit(
            "No virtual environment could be made. Debian and Ubuntu keep the module in a package "
            "of its own: apt-get install python3-venv"
        )


def setup() -> Path:
    """Return the Python to work with, with everything installed; does nothing the second time."""
    if active_environment_with_torch():
        python = Path(sys.executable)
        stamp = Path(sys.prefix) / ".pycutfuse-setup"
    else:
        python = VENV / "bin" / "python"
        if not python.exists():
            make_venv()
        stamp = VENV / ".pycutfuse-setup"
    os.environ["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    pins = (ROOT / "pyproject.toml").read_bytes() + sys.version.encode()
    state = hashlib.sha256(pins).hexdigest()
    with_torch = has_module(python, "torch")
    if with_torch:
        check_torch(python)
    tools = shutil.which("cmake") and shutil.which("ninja")
    if with_torch and tools and stamp.exists() and stamp.read_text() == state:
        return python
    needed = requirements()
    if not with_torch:
        say(f"{TORCH} is being installed; with its CUDA libraries it can be several GB")
        needed.append(TORCH)
    run(python, "-m", "pip", "install", *needed)
    stamp.write_text(state)
    return python


def has_gpu(python: Path) -> bool:
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.run([str(python), "-c", code], cwd="/", **quiet).returncode == 0


def build(python: Path) -> None:
    """Configure and build in the tree. Without nvcc CMake says so and builds nothing."""
    say(f"Building in build/{PRESET} (the first build of all kernels takes minutes)")
    launcher = "ccache" if shutil.which("ccache") else ""
    # One cache entry for all build folders of this tree, that of the wheel among them.
    os.environ.setdefault("CCACHE_BASEDIR", str(ROOT))
    os.environ.setdefault("CCACHE_NOHASHDIR", "true")
    options = [f"-DCMAKE_{language}_COMPILER_LAUNCHER={launcher}" for language in ("CXX", "CUDA")]
    run("cmake", "--preset", PRESET, f"-DPython_EXECUTABLE={python}", *options)
    if any((ROOT / "build" / PRESET).glob("*.ninja")):
        run("cmake", "--build", "--preset", PRESET)


def test(python: Path, arguments: list[str]) -> None:
    build(python)
    say("Testing")
    if not has_gpu(python):
        say("No GPU here: the tests that need one are skipped, and the summary counts them")
        # Tests of a GPU would share it. A process has one core: more threads would wait for it.
        arguments = ["--numprocesses", "auto", *arguments]
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    run(python, "-m", "pytest", *arguments)


def bench(python: Path, arguments: list[str]) -> None:
    if has_gpu(python):
        build(python)
    else:
        say("No GPU here: the kernels are not built; the reference path runs at reduced sizes")
    run(python, "-m", "pycutfuse", "bench", *arguments)


def clang_format(python: Path) -> Path:
    return python.parent / "clang-format"


def cpp_files() -> list[str]:
    folders = ("include", "cpp", "tests/cpp")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*")]
    return sorted(str(f.relative_to(ROOT)) for f in files if f.suffix in CPP_SUFFIXES)


def lint(python: Path) -> None:
    """Run every check, then fail if one did."""
    checks = (
        [python, "-m", "ruff", "check", "."],
        [python, "-m", "ruff", "format", "--check", "."],
        [python, "-m", "mypy"],
        [clang_format(python), "--dry-run", "-Werror", *cpp_files()],
    )
    failed = [check for check in checks if show_and_run(*check) != 0]
    sys.exit(
        f"{len(failed)} of {len(checks)} checks failed; `make format` mends layout" if failed else 0
    )


def format_sources(python: Path) -> None:
    run(python, "-m", "ruff", "check", "--fix-only", ".")
    run(python, "-m", "ruff", "format", ".")
    run(clang_format(python), "-i", *cpp_files())


USAGE = "usage: tools/dev.py bench|test [arguments], or build|lint|format"


def main() -> None:
    if sys.argv[1:2] in (["--help"], ["-h"]):
        print(USAGE)
        return
    if len(sys.argv) < 2 or sys.argv[1] not in ("bench", "test", "build", "lint", "format"):
        sys.exit(USAGE)
    command, arguments = sys.argv[1], sys.argv[2:]
    if arguments and command not in ("bench", "test"):
        sys.exit(f"{command} takes no arguments, but got {shlex.join(arguments)}")
    python = setup()
    if command == "bench":
        bench(python, arguments)
    elif command == "test":
        test(python, arguments)
    elif command == "build":
        build(python)
    elif command == "lint":
        lint(python)
    else:
        format_sources(python)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT
