"""Tracing as a process has it: on where a collector is configured, and OpenTelemetry loaded only then."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry

from telemetry.trace_metrics import TraceMetrics

if TYPE_CHECKING:  # it loads OpenTelemetry
    from telemetry.tracing import Tracer

CLOSE_TIMEOUT_S: Final = 1.0


def open_tracer(endpoint: str, ratio: float, service: str, instance: str, registry: CollectorRegistry) -> Tracer | None:
    """None where there is no endpoint, and nothing is traced. ratio, service, instance: as Tracer.
    registry: gets the metrics of what is lost, where anything is traced."""
    if not endpoint:
        return None
    # Imported here: OpenTelemetry takes a tenth of a second.
    from telemetry.tracing import Tracer

    return Tracer(endpoint, ratio, service, instance, TraceMetrics(registry))


async def close_tracer(tracer: Tracer | None) -> None:
    """Send what has ended, for a bounded time."""
    if tracer is not None:
        await asyncio.to_thread(tracer.close, CLOSE_TIMEOUT_S)
