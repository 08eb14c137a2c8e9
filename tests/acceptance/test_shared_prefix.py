"""A prefix computed by one worker is a hit on another: found in the shared index, pushed by its holder over NIXL.

The hit comes first: two requests at once go to two prefill workers as long as the router has not learnt that one is
much slower, which a busy machine may teach it while all golden cases are computed.
"""

from __future__ import annotations

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.acceptance.golden import CASES
from tests.acceptance.running_cluster import RunningCluster
from tests.acceptance.test_golden_modes import WITHOUT_1024, ask_all, assert_golden, assert_moved

(CASE,) = [case for case in CASES if case.name == "shared_prefix_b"]
SHARED = CASE.prompt_ids[:320]


def ask(cluster: RunningCluster, salt: str, prompt=CASE.prompt_ids, max_tokens: int = 64) -> dict[str, Any]:
    return cluster.complete(list(prompt), max_tokens=max_tokens, cache_salt=salt, tandem={"prefill": "remote"})


def test_a_second_prefill_worker_gets_the_prefix_from_the_first(two_prefills: RunningCluster) -> None:
    """Two requests with the prefix already cached on one prefill worker, at once: each worker serves one of them."""
    for attempt in range(5):  # on a machine that stalls, the index's bound of 50 ms may cost a hit: that is its right
        fetched = serve_twice_at_once(two_prefills, f"fetch-{attempt}")
        if any(fetched):
            break
    assert sorted(fetched) == [0, len(SHARED)]


def serve_twice_at_once(cluster: RunningCluster, salt: str) -> list[int]:
    """Cache the prefix on one prefill worker, then ask twice at once; how many tokens each request fetched."""
    ask(cluster, salt, (*SHARED, 504), max_tokens=1)
    cluster.wait_idle()
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: ask(cluster, salt), range(2)))
    for answer in answers:
        assert tuple(answer["choices"][0]["token_ids"]) == CASE.output_ids
    cluster.wait_idle()
    fetched = [answer["usage"]["tandem"]["fetched_tokens"] for answer in answers]
    if any(fetched):  # then neither computed what was cached somewhere
        computed = [answer["usage"]["tandem"]["computed_tokens"] for answer in answers]
        assert max(computed) <= len(CASE.prompt_ids) - len(SHARED)
    return fetched


def test_another_salt_gets_no_hit(two_prefills: RunningCluster) -> None:
    """The positive control is the test above."""
    answer = ask(two_prefills, "another", max_tokens=4)
    assert answer["usage"]["tandem"]["fetched_tokens"] == 0
    assert answer["usage"]["tandem"]["computed_tokens"] == len(CASE.prompt_ids)


def test_disaggregated_in_chunks_of_64_tokens_on_two_prefill_workers(two_prefills: RunningCluster) -> None:
    for case, answer in ask_all(two_prefills, "remote", at_once=4, cases=WITHOUT_1024):
        assert_golden(answer, case)
        assert_moved(two_prefills, answer, case)
    two_prefills.wait_idle()


def test_without_redis_the_system_serves_on(two_prefills: RunningCluster) -> None:
    """Last here: the cluster's Valkey is killed."""
    os.kill(valkey_pid(two_prefills.pid), signal.SIGKILL)
    for number in range(3):
        answer = ask(two_prefills, f"no-redis-{number}")
        assert tuple(answer["choices"][0]["token_ids"]) == CASE.output_ids
    two_prefills.wait_idle()


def valkey_pid(ancestor: int) -> int:
    """The Valkey below `tandem up`."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):  # it may end while we look
                parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(process.name)] = (process / "cmdline").read_text()

    def below(pid: int) -> bool:
        return pid == ancestor or (pid in parents and below(parents[pid]))

    (found,) = [pid for pid, name in names.items() if "valkey-server" in name and below(pid)]
    return found
