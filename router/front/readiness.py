"""Whether this router can serve now: asked by /health, and published as grpc.health.v1."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2

# Why requests cannot be served ("no ready decode worker"), or None when they can.
Readiness = Callable[[], str | None]

LIVE: Final = "live"
READY: Final = "ready"
FOLLOW_INTERVAL_S: Final = 0.5


class ReadinessHealth(health.aio.HealthServicer):  # type: ignore[misc]  # grpcio-health-checking has no types
    """grpc.health.v1 whose answers follow `readiness`.

    "" and "live" say that the process answers, "ready" and the service names that it can serve. A Check asks
    anew; Watch-ers hear of a change when `follow` or any Check sees it.
    """

    def __init__(self, readiness: Readiness, service_names: tuple[str, ...]) -> None:
        super().__init__()
        self._readiness = readiness
        self._names = (READY, *service_names)
        self._last: int | None = None

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        await self.refresh()
        return await super().Check(request, context)

    async def refresh(self) -> None:
        """Publish the state as it is now."""
        serving = health_pb2.HealthCheckResponse.SERVING
        status = health_pb2.HealthCheckResponse.NOT_SERVING if self._readiness() else serving
        if status == self._last:
            return
        self._last = status
        await self.set(LIVE, serving)
        for name in self._names:
            await self.set(name, status)

    async def follow(self) -> None:
        """Refresh until cancelled, for those who Watch."""
        while True:
            await self.refresh()
            await asyncio.sleep(FOLLOW_INTERVAL_S)
