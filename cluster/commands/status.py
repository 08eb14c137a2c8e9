"""`tandem status`: what the router sees, as a table or as JSON."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any, Final

COLUMNS: Final = ("WORKER", "ROLE", "LIFE", "ADDRESS", "RUNNING", "WAITING", "USED", "FREE", "QUARANTINED", "PEERS")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `status`."""
    text = "show workers, their load and their connections"
    parser = commands.add_parser("status", help=text, description=f"{text.capitalize()}. Blocks are KV blocks.")
    parser.add_argument(
        "--registry",
        default="127.0.0.1:50052",
        metavar="HOST:PORT",
        help="the registry (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print tandem.v1.GetStatusResponse as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask and print."""
    # Imported here: the other commands start sooner without gRPC.
    from google.protobuf.json_format import MessageToJson

    from cluster.status_client import fetch_status

    status = asyncio.run(fetch_status(arguments.registry))
    if arguments.json:
        print(MessageToJson(status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
    else:
        print(table(status))
    return 0


def table(status: Any) -> str:
    """One row a worker, then the router's own counts."""
    rows = [COLUMNS, *(_row(item) for item in sorted(status.workers, key=lambda item: item.worker.ref.worker_id))]
    widths = [max(len(row[index]) for row in rows) for index in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, f"open requests: {status.open_requests}, queued: {status.queued_requests}"])


def _row(item: Any) -> tuple[str, ...]:
    worker, load = item.worker, item.load
    peers = ", ".join(f"{peer.peer.worker_id} ({peer.lane}, {peer.probe_gbps:.1f} GB/s)" for peer in item.peers)
    counts = (load.running_requests, load.waiting_requests, load.used_blocks, load.free_blocks, load.quarantined_blocks)
    role = {1: "prefill", 2: "decode"}.get(worker.role, "?")  # tandem.v1.Role
    return (worker.ref.worker_id, role, item.life, worker.address, *map(str, counts), peers or "-")
