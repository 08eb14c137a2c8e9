"""`tandem status`: what the routers see, as a table or as JSON."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from cluster.commands import flags

if TYPE_CHECKING:  # the other commands start sooner without protobuf
    from tandem.v1.worker_pb2 import GetStatusResponse, WorkerStatus

COLUMNS: Final = (
    "WORKER", "ROLE", "LIFE", "ADDRESS", "METRICS", "RUNNING", "WAITING", "USED", "FREE", "QUARANTINED", "PEERS"
)  # fmt: skip


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `status`."""
    text = "show workers, their load and their connections"
    parser = commands.add_parser("status", help=text, description=f"{text.capitalize()}. Blocks are KV blocks.")
    flags.add_registry(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print tandem.v1.GetStatusResponse as JSON; a list where routers are several",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask and print."""
    # Imported here: the other commands start sooner without gRPC.
    from google.protobuf.json_format import MessageToJson

    from cluster.status_client import fetch_all

    statuses = asyncio.run(fetch_all(arguments.registry.split(",")))
    if arguments.json:
        options = {"preserving_proto_field_name": True, "always_print_fields_with_no_presence": True}
        texts = [MessageToJson(status, **options) for status in statuses.values() if status is not None]
        print(texts[0] if len(statuses) == 1 else f"[{', '.join(texts)}]")
    else:
        print(table(statuses))
    return 0


def table(statuses: Mapping[str, GetStatusResponse | None]) -> str:
    """One row a worker, then each router's own counts. `statuses`: by address; None: it does not answer."""
    workers: dict[str, WorkerStatus] = {}
    for status in filter(None, statuses.values()):
        for item in status.workers:
            workers.setdefault(item.worker.ref.worker_id, item)
    rows = [COLUMNS, *(_row(workers[worker_id]) for worker_id in sorted(workers))]
    widths = [max(len(row[index]) for row in rows) for index in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(statuses) == 1:
        return "\n".join([*lines, *map(_counts, filter(None, statuses.values()))])
    return "\n".join([*lines, *(f"router {address}: {_seen(status)}" for address, status in statuses.items())])


def _seen(status: GetStatusResponse | None) -> str:
    if status is None:
        return "does not answer"
    num_ready = sum(item.life == "ready" for item in status.workers)
    return f"ready workers: {num_ready} of {len(status.workers)}, {_counts(status)}"


def _counts(status: GetStatusResponse) -> str:
    return f"open requests: {status.open_requests}, queued: {status.queued_requests}"


def _row(item: WorkerStatus) -> tuple[str, ...]:
    worker, load = item.worker, item.load
    peers = ", ".join(f"{peer.peer.worker_id} ({peer.lane}, {peer.probe_gbps:.1f} GB/s)" for peer in item.peers)
    counts = (load.running_requests, load.waiting_requests, load.used_blocks, load.free_blocks, load.quarantined_blocks)
    role = {1: "prefill", 2: "decode"}.get(worker.role, "?")  # tandem.v1.Role
    addresses = (worker.address, worker.metrics_address or "-")
    return (worker.ref.worker_id, role, item.life, *addresses, *map(str, counts), peers or "-")
