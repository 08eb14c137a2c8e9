"""`tandem role` and `tandem drain`: ask the controller to let a worker finish, and to change what it serves as."""

from __future__ import annotations

import argparse
import asyncio

from cluster.commands import flags
from core.membership import Role


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `role` and `drain`."""
    text = "let a worker drain and go on in another role, without loading anything again"
    role = commands.add_parser(
        "role",
        help=text,
        description=f"{text.capitalize()}. Its streams go on, on other workers where there are any. It also puts a "
        "drained worker back. Ends with code 1, and says why, when the worker keeps its role.",
    )
    role.add_argument("worker", metavar="WORKER", help="its name in `tandem status`: decode-0")
    role.add_argument("role", choices=[role.value for role in Role])
    _add_options(role)
    text = "let a worker finish or hand over what it has; it then takes nothing until `tandem role`, or its end"
    drain = commands.add_parser("drain", help=text, description=f"{text.capitalize()}.")
    drain.add_argument("worker", metavar="WORKER", help="its name in `tandem status`: decode-0")
    _add_options(drain)
    drain.set_defaults(role=None)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="do it even when no other decode worker is ready")
    parser.add_argument(
        "--timeout",
        dest="timeout_s",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="what is open after so long keeps the worker as it is (default: the cluster's drain_timeout_s)",
    )
    flags.add_controller_address(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask, wait, print."""
    # Imported here: the other commands start sooner without gRPC.
    from cluster.controller_client import drain_worker
    from cluster.fleet import DrainRefused, RefusalReason

    worker, role = arguments.worker, arguments.role
    try:
        answer = asyncio.run(drain_worker(arguments.controller, worker, role, arguments.force, arguments.timeout_s))
    except DrainRefused as refused:
        if refused.reason is RefusalReason.LAST_DECODE_WORKER:
            raise DrainRefused(refused.reason, f"{refused} (--force does it all the same)") from None
        raise
    done = f"serves as {role}" if role else "is drained"
    print(f"{worker} {done} after {answer.duration_s:.2f} s" if answer.changed else f"{worker} {done} already")
    return 0
