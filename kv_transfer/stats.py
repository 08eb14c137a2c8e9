"""Counters of one transport, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TransportStats:
    """A total since start and two gauges. Written by one thread; read a copy of it through `stats()`."""

    peers_lost: int = 0  # since start
    in_flight: int = 0  # posted, not settled
    zombies: int = 0  # the ones in flight to a peer that was dropped or lost
