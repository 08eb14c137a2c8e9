"""`tandem drill`: faults on a live cluster of this machine, each checked."""

from __future__ import annotations

import argparse
import asyncio

from cluster.api_key import VARIABLE
from cluster.commands import flags
from core.errors import BadRequest


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `drill`."""
    parser = commands.add_parser(
        "drill",
        help="kill, restart and cut off parts of a live cluster, and check that no client sees it",
        description="On a cluster of this machine: kill a decode worker mid-stream, drop a client mid-transfer, "
        "restart a decode worker, stop the embedded Redis for a moment. After each, streams must equal an undisturbed "
        "run, and no block may stay behind. Prints PASS and the figures; ends with code 1 at the first that is not so. "
        f"{VARIABLE} in the environment is the key, where one is needed.",
    )
    parser.add_argument("--yes", action="store_true", help="really do it; streams of other clients pause meanwhile")
    flags.add_url(parser)
    text = "a router's registry (default: %(default)s)"
    parser.add_argument("--registry", default="127.0.0.1:50052", metavar="HOST:PORT", help=text)
    flags.add_controller_address(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check that it is meant, then do it."""
    if not arguments.yes:
        raise BadRequest("--yes", "is not given, and this kills and stops processes of a running cluster")
    # Imported here: the other commands start sooner without gRPC.
    from cluster.drill import Drill, DrillTarget

    target = DrillTarget(arguments.url, arguments.registry, arguments.controller)
    asyncio.run(Drill(target, lambda line: print(line, flush=True)).run())
    return 0
