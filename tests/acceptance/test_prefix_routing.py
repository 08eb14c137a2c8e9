"""Requests go where their prompt's beginning is cached: workers tell the router what they hold."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.golden import CASES
from tests.acceptance.running_cluster import RunningCluster, running_cluster, wait_until

(CASE,) = [case for case in CASES if case.name == "shared_prefix_b"]
SHARED = CASE.prompt_ids[:320]
OTHER = CASE.prompt_ids[319::-1]


@pytest.fixture(scope="module")
def two_decodes(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Two decode workers that prefill for themselves."""
    with running_cluster(
        model_folder, tmp_path_factory.mktemp("two-decodes"), "--aggregated", "--decode", "2"
    ) as cluster:
        yield cluster


def ask(cluster: RunningCluster, *prompt: int, max_tokens: int = 1) -> dict[str, Any]:
    return cluster.complete(list(prompt), max_tokens=max_tokens, ignore_eos=True)


def computed(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["tandem"]["computed_tokens"])


def chosen(cluster: RunningCluster) -> list[str]:
    """The decode worker of each plan, in order."""
    (log,) = cluster.folder.glob("run/*/logs/router*.log")
    return re.findall(r"state=planned .*?decode=([\w-]+)@", log.read_text())


def known_blocks(cluster: RunningCluster) -> int:
    with urllib.request.urlopen(f"{cluster.http}/metrics", timeout=5) as response:
        (value,) = re.findall(rb"^tandem_router_known_blocks (\S+)", response.read(), re.MULTILINE)
    return int(float(value))


def test_aggregated_workers_do_both(two_decodes: RunningCluster) -> None:
    cluster, case = two_decodes, next(case for case in CASES if case.name == "short")
    assert sorted(cluster.workers()) == ["decode-0", "decode-1"]
    with urllib.request.urlopen(f"{cluster.http}/health", timeout=10) as response:
        assert json.load(response) == {"status": "ok"}
    answer = cluster.complete(list(case.prompt_ids), max_tokens=64)
    assert tuple(answer["choices"][0]["token_ids"]) == case.output_ids
    assert answer["usage"]["tandem"]["kv_blocks_moved"] == 0
    cluster.wait_idle()


def test_a_prefix_goes_to_its_holder_and_another_one_to_the_idle_worker(two_decodes: RunningCluster) -> None:
    """The holder is busy with a long answer to the prefix, so that without the view both would go to the other one."""
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, two_decodes, *SHARED, 7, max_tokens=400)
        wait_until(lambda: known_blocks(two_decodes) >= len(SHARED) // 16, 30.0, lambda: str(known_blocks(two_decodes)))
        same, other = ask(two_decodes, *SHARED, 8, 9), ask(two_decodes, *OTHER, 8, 9)
        assert not long.done(), "it ended before the others were planned: too short for this machine"
        first, second, third = chosen(two_decodes)[-3:]
        long.result()
    assert second == first
    assert computed(same) == 2
    assert third != first
    assert computed(other) == len(OTHER) + 2
    two_decodes.wait_idle()


def test_what_the_router_believes_outlives_no_worker(two_decodes: RunningCluster) -> None:
    """A worker that is killed takes its cache along: its prefix is computed again, and rightly."""
    holder = chosen(two_decodes)[-3]
    before = two_decodes.workers()[holder].worker.ref.incarnation
    known = known_blocks(two_decodes)
    os.kill(two_decodes.worker_pid(holder), signal.SIGKILL)
    wait_until(lambda: known_blocks(two_decodes) < known, 30.0)

    def is_back() -> bool:
        found = two_decodes.workers().get(holder)
        return found is not None and found.life == "ready" and found.worker.ref.incarnation != before

    wait_until(is_back, 60.0)
    again = two_decodes.complete(list(CASE.prompt_ids), max_tokens=len(CASE.output_ids))
    assert tuple(again["choices"][0]["token_ids"]) == CASE.output_ids
    assert computed(again) == len(CASE.prompt_ids)
