"""What the commands share: no traceback of a wrong option, a closed pipe or a full disk."""

import argparse
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

FAILED, INTERRUPTED, CUT_OFF = 1, 130, 141  # as shells say it: 128 + SIGINT, 128 + SIGPIPE

Kind = TypeVar("Kind", int, float)


def progress(text: str) -> None:
    """One line on stderr, which nobody has to read."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def number(text: str, kind: type[Kind]) -> Kind:
    """``kind(text)`` of an option. Of a ValueError argparse would name the function that raised."""
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no {kind.__name__}") from None


def positive(text: str) -> int:
    """The integer of an option, at least 1."""
    value = number(text, int)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def why_no_file(path: Path) -> str | None:
    """Why `path` cannot be written, or None: to be known before the work whose result goes there.

    What is not there yet is not made.
    """
    try:
        folder = path.resolve().parent
        if not folder.is_dir():
            return f"{path}: the folder {folder} does not exist"
        if path.is_dir():
            return f"{path}: a folder; the name of a file is needed"
        if not os.access(path if path.exists() else folder, os.W_OK):
            return f"{path}: cannot be written"
    except OSError as error:  # a name that is too long
        return f"{path}: {error.strerror}"
    return None


def guarded(command: Callable[[], int]) -> int:
    """Run a command and return its exit status.

    Characters that stdout cannot encode are replaced. A closed pipe behind stdout ends the command
    quietly, any other error of it in one line.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            return command()
        finally:
            print(end="", flush=True)
    except KeyboardInterrupt:
        progress("pycutfuse: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        status = CUT_OFF
    except OSError as error:
        if error.filename is not None:
            raise
        progress(f"pycutfuse: stdout: {error.strerror}")
        status = FAILED
    # Python flushes once more when it ends.
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status
