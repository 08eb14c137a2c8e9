"""Workers of two ranks each, by torch on this machine: hand-offs of both ranks' parts, and the end of a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import processes
from engine.torch_runner import TorchModelRunner
from tests.acceptance.running_cluster import RunningCluster, running_cluster, wait_until
from tests.engine.tiny_model import write_tiny_model
from tests.engine.token_stream import generate

PROMPT = [3 + 7 * index % 250 for index in range(90)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("shared") / "tiny", vocab_size=260)


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TANDEM_ENGINE", "torch")
        cache = tmp_path_factory.mktemp("ranks")
        with running_cluster(folder, cache, tensor_parallel_size=2, num_blocks=64, token_budget=32) as running:
            yield running


def ranks_of(cluster: RunningCluster, worker_id: str) -> list[processes.Process]:
    below = processes.descendants(cluster.worker_pid(worker_id))
    return [process for process in below if "spawn_main" in processes.command_of(process)]


def test_a_hand_off_between_workers_of_two_ranks_says_what_one_rank_says(cluster: RunningCluster, folder: Path) -> None:
    [expected] = generate(TorchModelRunner.load(folder, "float32", 64), [PROMPT], [24], 90)
    assert len(set(expected)) > 4
    answer = cluster.complete(PROMPT, max_tokens=24, ignore_eos=True, tandem={"prefill": "remote"})
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["usage"]["tandem"]["kv_blocks_moved"] == 6
    assert [len(ranks_of(cluster, worker_id)) for worker_id in ("prefill-0", "decode-0")] == [1, 1]
    cluster.wait_idle()


def test_a_worker_that_loses_a_rank_is_replaced_with_all_its_ranks(cluster: RunningCluster, folder: Path) -> None:
    before = cluster.workers()["decode-0"].worker.ref.incarnation
    [rank] = ranks_of(cluster, "decode-0")
    os.kill(rank.pid, signal.SIGKILL)

    def is_new() -> bool:
        worker = cluster.workers().get("decode-0")
        return worker is not None and worker.worker.ref.incarnation != before

    wait_until(is_new, 60)
    [expected] = generate(TorchModelRunner.load(folder, "float32", 64), [PROMPT], [24], 90)
    answer = cluster.complete(PROMPT, max_tokens=24, ignore_eos=True, cache_salt="again")
    assert answer["choices"][0]["token_ids"] == expected
    assert [len(ranks_of(cluster, worker_id)) for worker_id in ("prefill-0", "decode-0")] == [1, 1]
    [log] = cluster.folder.glob("run/*/logs/decode-0.log")
    assert "rank 1 ended with exit code -9" in log.read_text()
