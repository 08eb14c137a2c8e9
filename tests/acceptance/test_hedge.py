"""A prefill worker that stands still, and second attempts: switched on in the policy file while the cluster serves."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.acceptance.golden import CASES
from tests.acceptance.running_cluster import RunningCluster, wait_until
from tests.acceptance.test_faults import Streaming

SHORT = next(case for case in CASES if case.name == "short")
AFTER_S = 0.5
HEDGE = {"after_s": AFTER_S, "max_share": 1.0}
WITHOUT_HEDGE_S = 4.0
SILENCE_S = 10.0  # RouterConfig.silence_timeout_s
SetHedge = Callable[[dict[str, Any] | None], None]


def counted(cluster: RunningCluster, name: str) -> int:
    found = re.search(rf"^{re.escape(name)} (\S+)$", cluster.metrics(), re.MULTILINE)
    return int(float(found[1])) if found else 0


def hedges(cluster: RunningCluster) -> dict[str, int]:
    return {way: counted(cluster, f'tandem_router_hedges_total{{outcome="{way}"}}') for way in ("begun", "won", "lost")}


@pytest.fixture
def set_hedge(two_decodes: RunningCluster) -> Iterator[SetHedge]:
    """Prompts are computed by the prefill worker, as long as it answers."""

    def write(policy: dict[str, Any]) -> None:
        before = counted(two_decodes, 'tandem_policy_reads_total{outcome="applied"}')
        two_decodes.policy.write_text(json.dumps(policy))
        wait_until(lambda: counted(two_decodes, 'tandem_policy_reads_total{outcome="applied"}') > before, 10.0)

    yield lambda hedge: write({"routing": {"local_prefill_cost": 1000, "hedge": hedge}})
    write({})
    two_decodes.wait_idle()


@contextmanager
def standing_still(cluster: RunningCluster, worker_id: str) -> Iterator[None]:
    pid = cluster.worker_pid(worker_id)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_worker_that_stands_still_delays_a_first_token_by_the_hedge_s_bound_only(
    two_decodes: RunningCluster, set_hedge: SetHedge
) -> None:
    set_hedge(HEDGE)
    before, lives = hedges(two_decodes), two_decodes.workers()["prefill-0"].worker.ref
    with standing_still(two_decodes, "prefill-0"):
        started_s = time.monotonic()
        stream = Streaming(two_decodes, SHORT.prompt_ids, max_tokens=32, cache_salt="hedged")
        wait_until(lambda: bool(stream.token_ids), 2 * SILENCE_S)
        ttft_s = time.monotonic() - started_s
        stream.join(30)
    assert AFTER_S <= ttft_s < SILENCE_S / 2
    assert stream.done and stream.error is None
    assert tuple(stream.token_ids) == SHORT.output_ids[:32]
    assert hedges(two_decodes) == {**before, "begun": before["begun"] + 1, "won": before["won"] + 1}
    two_decodes.wait_idle()  # of the attempt that lost nothing is left, on the worker that thawed either
    assert two_decodes.workers()["prefill-0"].worker.ref == lives


def test_without_a_hedge_it_waits_as_long_as_the_worker_stands_still(
    two_decodes: RunningCluster, set_hedge: SetHedge
) -> None:
    """The control: until the worker thaws, or after ten seconds counts as hung."""
    set_hedge(None)
    before = hedges(two_decodes)
    with standing_still(two_decodes, "prefill-0"):
        stream = Streaming(two_decodes, SHORT.prompt_ids, max_tokens=32, cache_salt="not hedged")
        with pytest.raises(AssertionError, match="not within"):
            wait_until(lambda: bool(stream.token_ids), WITHOUT_HEDGE_S)
    stream.join(30)
    assert tuple(stream.token_ids) == SHORT.output_ids[:32]
    assert hedges(two_decodes) == before
