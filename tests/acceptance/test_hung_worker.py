"""A decode worker that stands still is a dead one: its streams go on elsewhere, and another takes its place."""

from __future__ import annotations

import os
import signal

from tests.acceptance.running_cluster import RunningCluster, wait_until
from tests.acceptance.test_drain import assert_all, streams, undisturbed

__all__ = ["undisturbed"]


def test_a_frozen_decode_worker_is_a_dead_one(two_decodes: RunningCluster, undisturbed: tuple[int, ...]) -> None:
    cluster, worker_id = two_decodes, "decode-1"
    started = streams(cluster, "freeze")
    before = cluster.workers()[worker_id].worker.ref.incarnation
    os.kill(cluster.worker_pid(worker_id), signal.SIGSTOP)
    assert_all(started, undisturbed)

    def replaced() -> bool:
        worker = cluster.workers().get(worker_id)
        return worker is not None and worker.worker.ref.incarnation != before and len(worker.peers) == 2

    wait_until(replaced, 90.0, lambda: str(cluster.status()))
    cluster.wait_idle()
