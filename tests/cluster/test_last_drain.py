"""The end of a cluster: one bound for routers and workers, and who is waited for."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import last_drain
from cluster.last_drain import LEAST_S, drain_all, tell_open_requests
from cluster.progress import Progress
from core.errors import Unreachable

TIMEOUT_S = 5.0


class Cluster:
    """Routers whose streams go on for so long, and then workers with hand-offs that do; on a clock of their own."""

    def __init__(self, streams_s: list[float], handoffs_s: float) -> None:
        self.now = 100.0
        self.said: list[str] = []
        self._streams_s, self._handoffs_s = streams_s, handoffs_s
        self._began_s = self.now

    async def _stop_router(self, stream_s: float) -> None:
        """They drain side by side."""
        self.said.append("router")
        await asyncio.sleep(0)
        self.now = max(self.now, self._began_s + min(stream_s, TIMEOUT_S))

    async def stop_workers(self, drain_s: float) -> None:
        self.said.append("workers")
        self.now += min(self._handoffs_s, drain_s)

    async def _tell(self) -> None:
        await asyncio.Event().wait()

    async def end(self) -> float:
        stopping = [self._stop_router(stream_s) for stream_s in self._streams_s]
        await drain_all(stopping, self.stop_workers, self._tell(), TIMEOUT_S, lambda: self.now)
        return self.now - self._began_s


@pytest.mark.parametrize(
    ("streams_s", "handoffs_s", "taken_s"),
    [
        ([0.0], 0.0, 0.0),
        ([2.0, 1.0], 0.0, 2.0),
        ([2.0, 1.0], 60.0, TIMEOUT_S),
        ([60.0, 0.0], 0.0, TIMEOUT_S),
        ([60.0, 60.0], 60.0, TIMEOUT_S + LEAST_S),
        ([], 60.0, TIMEOUT_S),
    ],
)
def test_the_bound_is_one_for_routers_and_workers(streams_s: list[float], handoffs_s: float, taken_s: float) -> None:
    cluster = Cluster(streams_s, handoffs_s)
    assert asyncio.run(cluster.end()) == taken_s
    assert cluster.said == [*["router"] * len(streams_s), "workers"]  # which serve until then


def test_it_is_said_for_how_many_requests_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch_all(addresses: list[str]) -> dict[str, Any]:
        assert addresses == ["a:1", "b:1"]
        counts = next(answers, None)
        if counts is None:
            raise Unreachable("gone")
        return {f"{index}": count and SimpleNamespace(open_requests=count) for index, count in enumerate(counts)}

    monkeypatch.setattr(last_drain, "fetch_all", fetch_all)
    monkeypatch.setattr(last_drain, "STILL_EVERY_S", 0.0)
    for counts, lines in (
        (
            [(2, 1), (1, None)],
            ["waiting for 3 open requests, 60 s at most", "waiting for 1 open request, 60 s at most"],
        ),
        ([], []),
    ):
        answers: Iterator[tuple[int | None, ...]] = iter(counts)
        output = io.StringIO()
        asyncio.run(tell_open_requests(Progress(output), ["a:1", "b:1"], 60.0))
        assert [line.partition("] ")[2] for line in output.getvalue().splitlines()] == lines
