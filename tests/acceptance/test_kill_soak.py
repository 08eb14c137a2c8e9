"""The short form of tests/acceptance/kill_soak.py: a kill waits until all workers serve, however slow the machine."""

from __future__ import annotations

from pathlib import Path

from tests.acceptance.kill_soak import FLAGS, Load, soak, verdict
from tests.acceptance.running_cluster import running_cluster


async def test_streams_over_workers_that_are_killed_say_what_they_say_undisturbed(
    model_folder: Path, tmp_path: Path
) -> None:
    with running_cluster(model_folder, tmp_path, *FLAGS) as cluster:
        report = await soak(
            cluster, Load(num_kills=3, every_s=2.0, num_streams=9, max_tokens=60, min_serving=4), 1, print
        )
    assert not verdict(report)
    assert sum(report.kills.values()) == 3 and report.answers >= 9
