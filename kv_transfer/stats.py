"""Counters of one transport, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TransportStats:
    """Totals since start, except the gauges. Written by one thread; read a copy of it through `stats()`."""

    pushes: int = 0  # settled well, with bytes
    bytes_pushed: int = 0
    notices_received: int = 0
    failed: int = 0  # pushes and notices that ended in WorkerLost or TransferFailed
    peers_lost: int = 0
    in_flight: int = 0  # gauge: posted, not settled
    zombies: int = 0  # gauge: the ones in flight to a peer that was dropped or lost
