"""Workers that drain while they hold requests in every state: none fails or says another token, every block returns."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from cluster.main import main
from tests.acceptance.golden import CASES
from tests.acceptance.running_cluster import RunningCluster, wait_until
from tests.acceptance.test_faults import Streaming

PROSE = next(case for case in CASES if case.name == "prose_1500")
SHORT = next(case for case in CASES if case.name == "short")
FIELDS = {"max_tokens": 150, "ignore_eos": True}


@pytest.fixture
def undisturbed(two_decodes: RunningCluster) -> tuple[int, ...]:
    answer = two_decodes.complete(list(SHORT.prompt_ids), cache_salt="undisturbed", **FIELDS)
    return tuple(answer["choices"][0]["token_ids"])


@pytest.fixture(autouse=True)
def nothing_left(two_decodes: RunningCluster) -> Iterator[None]:
    yield
    two_decodes.wait_idle()


def streams(cluster: RunningCluster, salt: str, count: int = 4) -> list[Streaming]:
    """Under way, on both decode workers."""
    started = [Streaming(cluster, SHORT.prompt_ids, cache_salt=f"{salt}-{n}", **FIELDS) for n in range(count)]
    wait_until(lambda: all(len(stream.token_ids) > 3 for stream in started), 60.0)
    loads = {name: worker.load.running_requests for name, worker in cluster.workers().items() if name != "prefill-0"}
    assert all(loads.values()), loads
    return started


def assert_all(started: list[Streaming], expected: tuple[int, ...]) -> None:
    for stream in started:
        stream.join(120)
        assert stream.error is None and stream.done
        assert tuple(stream.token_ids) == expected


def ask(cluster: RunningCluster, *arguments: str) -> int:
    return main([*arguments, "--controller", cluster.controller])


def test_a_drained_decode_worker_hands_over_its_streams_and_a_hand_off_that_has_not_landed(
    two_decodes: RunningCluster, undisturbed: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = two_decodes
    started = streams(cluster, "drain")
    started_prose = [  # one for each decode worker
        Streaming(cluster, PROSE.prompt_ids, max_tokens=16, cache_salt=f"prose-{n}", tandem={"prefill": "remote"})
        for n in range(2)
    ]
    # Blocks are reserved, some are pushed, none has landed.
    wait_until(lambda: 0 < cluster.workers()["prefill-0"].load.waiting_tokens < 2900, 60.0)
    assert ask(cluster, "drain", "decode-0") == 0
    assert "decode-0 is drained after" in capsys.readouterr().out
    held = cluster.workers()["decode-0"]
    assert held.life in ("draining", "drained")  # as long as its last report may say so
    wait_until(lambda: cluster.workers()["decode-0"].life == "drained", 5.0)
    assert not cluster.workers()["decode-0"].load.used_blocks
    assert not all(stream.done for stream in started)  # so they were open, and are elsewhere now
    assert_all(started, undisturbed)
    assert_all(started_prose, PROSE.output_ids[:16])
    answer = cluster.complete(
        list(SHORT.prompt_ids), cache_salt="meanwhile", tandem={"prefill": "remote"}, max_tokens=8
    )
    assert tuple(answer["choices"][0]["token_ids"]) == SHORT.output_ids[:8]
    assert ask(cluster, "drain", "decode-1") == 1
    assert "last decode worker" in capsys.readouterr().err
    assert ask(cluster, "role", "decode-0", "decode") == 0
    assert {worker.life for worker in cluster.workers().values()} == {"ready"}


def test_a_prefill_worker_that_drains_loses_no_prompt(two_decodes: RunningCluster) -> None:
    cluster = two_decodes
    prompts = [Streaming(cluster, PROSE.prompt_ids, max_tokens=16, cache_salt=f"queued-{n}") for n in range(2)]
    wait_until(lambda: cluster.workers()["prefill-0"].load.waiting_tokens > 0, 60.0)
    assert ask(cluster, "drain", "prefill-0") == 0
    assert_all(prompts, PROSE.output_ids[:16])
    assert ask(cluster, "role", "prefill-0", "prefill") == 0


def test_sigterm_to_a_worker_is_a_drain_and_then_another_life(
    two_decodes: RunningCluster, undisturbed: tuple[int, ...]
) -> None:
    """The notice of a host that goes away."""
    cluster = two_decodes
    started = streams(cluster, "sigterm")
    before = cluster.workers()["decode-1"].worker.ref.incarnation
    os.kill(cluster.worker_pid("decode-1"), signal.SIGTERM)
    wait_until(lambda: cluster.workers()["decode-1"].life in ("draining", "drained"), 30.0)
    assert_all(started, undisturbed)

    def replaced() -> bool:
        worker = cluster.workers().get("decode-1")
        return worker is not None and worker.worker.ref.incarnation != before and len(worker.peers) == 2

    wait_until(replaced, 60.0)
