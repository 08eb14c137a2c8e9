"""`tandem leave`: before a host goes, the workers on it hand over what they have."""

from __future__ import annotations

import argparse
import asyncio
import sys

from cluster.commands import flags


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `leave`."""
    text = "drain the workers of this host, before it goes"
    parser = commands.add_parser(
        "leave",
        help=text,
        description=f"{text.capitalize()}: the preStop hook of a worker's pod. Ends with code 0 once they have nothing "
        "any more, or there is none; with code 1, and says why, when that takes too long, as for the last decode "
        "worker, or while the whole cluster ends.",
    )
    flags.add_registry(parser)
    flags.add_controller_address(parser)
    for name, default, text in (("--after", 0.0, "wait so long first"), ("--within", 60.0, "take no longer than this")):
        parser.add_argument(name, type=float, default=default, metavar="SECONDS", help=f"{text} (default: {default:g})")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Drain, and say what is left."""
    # Imported here: the other commands start sooner without gRPC.
    from cluster.leave import leave

    left = asyncio.run(leave(arguments.registry.split(","), arguments.controller, arguments.after, arguments.within))
    if left:
        print(f"tandem: after {arguments.within:g} s: {left}", file=sys.stderr)
    return 1 if left else 0
