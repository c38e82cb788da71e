"""What the commands print: a reader that goes away, or a full disk, gives no traceback."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress

FAILED, INTERRUPTED, CUT_OFF = 1, 130, 141  # as shells say it: 128 + SIGINT, 128 + SIGPIPE


def progress(text: str) -> None:
    """One line on stderr, which nobody has to read."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


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
