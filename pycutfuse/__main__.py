"""Command line: ``python -m pycutfuse info | bench | verify FILE``."""

import argparse
import sys
from collections.abc import Sequence

from pycutfuse._console import guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    return guarded(lambda: _run(given))


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycutfuse", description="Fused tensor-core kernels for PyTorch."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, library, devices, and what is missing")
    info.add_argument("--json", action="store_true", help="print JSON")
    if arguments[:1] == ["info"]:
        from pycutfuse import info as info_command

        return info_command.main(as_json=info.parse_args(arguments[1:]).json)

    from pycutfuse.bench import cli

    cli.add_arguments(commands)
    parsed = parser.parse_args(arguments)
    status: int = parsed.run(parsed)
    return status


if __name__ == "__main__":
    sys.exit(main())
