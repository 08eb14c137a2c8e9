"""The short form of tests/acceptance/kill_soak.py: a kill waits until all workers serve, however slow the machine."""

from __future__ import annotations

from tests.acceptance.kill_soak import Load, soak, verdict
from tests.acceptance.running_cluster import RunningCluster


async def test_streams_over_workers_that_are_killed_say_what_they_say_undisturbed(two_decodes: RunningCluster) -> None:
    load = Load(num_kills=3, every_s=1.0, num_streams=9, max_tokens=40, min_serving=3)
    report = await soak(two_decodes, load, 1, print)
    assert not verdict(report)
    assert sum(report.kills.values()) == 3 and report.answers >= 9
