"""A worker that changes its role while streams run: the process, its weights and its cache stay, the streams go on."""

from __future__ import annotations

import time

import pytest
from tandem.v1 import worker_pb2

from cluster.main import main
from tests.acceptance.golden import CASES
from tests.acceptance.running_cluster import RunningCluster
from tests.acceptance.test_drain import assert_all, streams, undisturbed

__all__ = ["undisturbed"]

PROSE = next(case for case in CASES if case.name == "prose_1500")


def role(cluster: RunningCluster, worker_id: str, to: str, *flags: str) -> int:
    return main(["role", worker_id, to, "--controller", cluster.controller, *flags])


def lives(cluster: RunningCluster, worker_id: str) -> tuple[int, str, int]:
    """Its process, its incarnation, and how often weights were loaded into it."""
    (log,) = cluster.folder.glob(f"run/*/logs/{worker_id}.log")
    loads = log.read_text().count("layer 1 of ")
    return cluster.worker_pid(worker_id), cluster.workers()[worker_id].worker.ref.incarnation, loads


def moved(cluster: RunningCluster, salt: str) -> int:
    """A long prompt through a prefill worker: its golden tokens. Returns the KV blocks that moved."""
    answer = cluster.complete(list(PROSE.prompt_ids), max_tokens=16, cache_salt=salt, tandem={"prefill": "remote"})
    assert tuple(answer["choices"][0]["token_ids"]) == PROSE.output_ids[:16]
    return int(answer["usage"]["tandem"]["kv_blocks_moved"])


def test_decode_to_prefill_and_back_while_streams_run(
    two_decodes: RunningCluster, undisturbed: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = two_decodes
    before = lives(cluster, "decode-1")
    assert before[2] >= 1
    started = streams(cluster, "switch", count=6)
    assert role(cluster, "decode-1", "prefill") == 0
    assert "decode-1 serves as prefill after" in capsys.readouterr().out
    switched = cluster.workers()["decode-1"]
    assert (switched.worker.role, switched.life) == (worker_pb2.ROLE_PREFILL, "ready")
    assert not all(stream.done for stream in started)
    assert role(cluster, "decode-1", "prefill") == 0
    assert "already" in capsys.readouterr().out
    assert role(cluster, "decode-0", "prefill") == 1
    assert "last decode worker" in capsys.readouterr().err
    assert role(cluster, "prefill-0", "decode") == 0  # decode-1 is all that prefills now
    assert moved(cluster, "by-decode-1") > 0
    assert role(cluster, "decode-1", "decode") == 0
    assert role(cluster, "prefill-0", "prefill") == 0
    assert moved(cluster, "by-prefill-0") > 0
    assert_all(started, undisturbed)
    assert lives(cluster, "decode-1") == before
    cluster.wait_idle()


def test_an_idle_worker_changes_its_role_at_once_and_keeps_what_it_has_cached(two_decodes: RunningCluster) -> None:
    cluster = two_decodes
    cluster.wait_idle()
    moved(cluster, "warm")  # prefill-0 has it, and so has one decode worker
    for to in ("decode", "prefill"):
        begun_s = time.monotonic()
        assert role(cluster, "prefill-0", to) == 0
        print(f"prefill-0 -> {to}: {time.monotonic() - begun_s:.3f} s")
    answer = cluster.complete(list(PROSE.prompt_ids), max_tokens=4, cache_salt="warm", tandem={"prefill": "remote"})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000


@pytest.mark.parametrize("arguments", [("decode-9", "prefill"), ("decode-0", "prefill", "--timeout", "-1")])
def test_what_cannot_be_is_refused_by_name(
    two_decodes: RunningCluster, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert role(two_decodes, *arguments) in (1, 2)
    error = capsys.readouterr().err
    assert "decode-9" in error or "--timeout" in error
    assert {worker.life for worker in two_decodes.workers().values()} == {"ready"}
