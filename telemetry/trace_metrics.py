"""Spans that no collector got. Routers and workers count them where they trace."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from prometheus_client import CollectorRegistry, Counter


class SpanLoss(StrEnum):
    """Why a span was lost."""

    QUEUE_FULL = "queue_full"  # more ended than the collector took
    NOT_DELIVERED = "not_delivered"  # the collector is away, refused them, or took too long


class TraceMetrics:
    """Registered once, in the registry handed in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lost: Final = Counter(
            "tandem_trace_spans_lost_total", "Spans that no collector got.", ["reason"], registry=registry
        )
        for reason in SpanLoss:
            self._lost.labels(reason)  # 0 until the first, so that a rate sees it

    def lost(self, reason: SpanLoss, num_spans: int) -> None:
        """From any thread."""
        self._lost.labels(reason).inc(num_spans)
