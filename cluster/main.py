"""The `tandem` command: parses, runs one subcommand, turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Final

from cluster.commands import chat, controller, drain, drill, flags, leave, model, router, status, up
from core.errors import BadRequest, TandemError

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `tandem ARGUMENTS`; returns the exit code: 0, 1 (failed), 2 (wrong use), 130 (Ctrl-C)."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC's notes on forks and shutdown are not for users
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except BadRequest as error:
        print(f"tandem: {flags.source_of(error.field, parsed)}: {error.message}", file=sys.stderr)
        return EXIT_USAGE
    except (TandemError, OSError) as error:  # a folder or file that cannot be written or read: it names it
        print(f"tandem: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem", description="Serve a language model with prefill and decode on separate workers."
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help="print the version and end"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Command)
    for command in (up, router, controller, chat, status, drain, leave, drill, model):
        command.add_parser(commands)
    return parser


class _Command(argparse.ArgumentParser):
    """Takes no flag that is cut short: it would mean another one, or nothing, in a later version."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)


class _Version(argparse.Action):
    """Not argparse's own, which would look the version up for each command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"tandem {version('tandem')}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
