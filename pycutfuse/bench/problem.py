"""Loading a problem file: Model, ModelNew, get_inputs, get_init_inputs."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn


class ProblemError(Exception):
    """A problem file that cannot be used; the text is one line for the user."""


@dataclass(frozen=True)
class Problem:
    """What a problem file defines.

    `get_inputs` returns the positional arguments of ``forward``, `get_init_inputs` those of both
    constructors.
    """

    path: Path
    model: Callable[..., nn.Module]
    model_new: Callable[..., nn.Module]
    get_inputs: Callable[[], list[Any]]
    get_init_inputs: Callable[[], list[Any]]


def load_problem(path: str | Path) -> Problem:
    """Execute a problem file and check that it has the four names.

    Raises
    ------
    ProblemError
        If the file does not exist, is not Python, fails while it is executed, lacks a name, or
        gives one of them the wrong kind of value.
    """
    path = Path(path)
    try:
        exists, is_file = path.exists(), path.is_file()
    except OSError as error:  # a name that is too long, a folder that may not be searched
        raise ProblemError(f"{path}: {error.strerror}") from error
    if not exists:
        raise ProblemError(f"{path}: no such file")
    if not is_file or path.suffix != ".py":
        raise ProblemError(f"{path}: not a Python file (a name ending in .py is needed)")
    name = f"_pycutfuse_problem_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ProblemError(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    # Pickling and copying of the file's classes look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        line = f":{error.lineno}" if error.lineno else ""  # 0: the file was not decoded
        raise ProblemError(f"{path}{line}: syntax error: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise ProblemError(f"{_place(error, path)}: {describe(error)}") from error
    for wanted, kind in (("Model", type), ("ModelNew", type)):
        value = getattr(module, wanted, None)
        if value is None:
            raise ProblemError(f"{path}: defines no {wanted}; Model and ModelNew are compared")
        if not isinstance(value, kind) or not issubclass(value, nn.Module):
            raise ProblemError(f"{path}: {wanted} is not a subclass of torch.nn.Module")
    for wanted in ("get_inputs", "get_init_inputs"):
        if not callable(getattr(module, wanted, None)):
            raise ProblemError(f"{path}: defines no function {wanted}()")
    return Problem(path, module.Model, module.ModelNew, module.get_inputs, module.get_init_inputs)


def arguments(problem: Problem, function: str) -> list[Any]:
    """Call ``get_inputs`` or ``get_init_inputs``; the result must be a list or a tuple."""
    try:
        values = getattr(problem, function)()
    except (Exception, SystemExit) as error:
        where = _place(error, problem.path)
        raise ProblemError(f"{where}: {function}() raised {describe(error)}") from error
    if not isinstance(values, list | tuple):
        kind = type(values).__name__
        raise ProblemError(f"{problem.path}: {function}() returned {kind}; a list is needed")
    return list(values)


def describe(error: BaseException) -> str:
    """Type and first line of an exception, for one line of output."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _place(error: BaseException, path: Path) -> str:
    """The file, and the line of it that raised, if one of it did."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(path.resolve())
    lines = [frame.lineno for frame in frames if frame.filename == own and frame.lineno]
    return f"{path}:{lines[-1]}" if lines else str(path)
