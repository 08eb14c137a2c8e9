"""Workers that die while they hold a request: a clear error or the right answer, no block lost, a new worker."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.acceptance.golden import CASES
from tests.acceptance.running_cluster import RunningCluster, pid_listening_on, running_cluster, wait_until

PROSE = next(case for case in CASES if case.name == "prose_1500")
SHORT = next(case for case in CASES if case.name == "short")
LEASE_S = 5.0


@pytest.fixture(scope="module")
def cluster(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with running_cluster(model_folder, tmp_path_factory.mktemp("faults"), lease_s=LEASE_S) as running:
        yield running


class Streaming:
    """One streamed completion in a thread: the tokens so far, and how it ended."""

    def __init__(self, cluster: RunningCluster, prompt: tuple[int, ...], **fields: Any) -> None:
        body = {
            "model": cluster.model, "prompt": list(prompt), "temperature": 0, "stream": True,
            "return_token_ids": True, **fields,
        }  # fmt: skip
        self._request = urllib.request.Request(
            f"{cluster.http}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        self.outputs: defaultdict[int, list[int]] = defaultdict(list)  # by choice
        self.text = ""  # of all choices, as it came
        self.error: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self.done = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def token_ids(self) -> list[int]:
        """Of the first choice."""
        return self.outputs[0]

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the stream is stuck"

    def _run(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=120) as response:
                for line in response:
                    self._line(line)
        except urllib.error.HTTPError as error:
            self.error = json.load(error)["error"]
        except (http.client.HTTPException, ConnectionError):
            self.error = None  # the router itself is gone; `done` stays False

    def _line(self, line: bytes) -> None:
        if line.startswith(b"data: [DONE]"):
            self.done = True
        elif line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            self.error = chunk.get("error", self.error)
            for choice in chunk.get("choices", ()):
                self.outputs[choice["index"]] += choice.get("token_ids", [])
                self.text += choice["text"]
                self.finish_reason = choice["finish_reason"] or self.finish_reason


def kill_and_wait_for_the_next_life(cluster: RunningCluster, worker_id: str) -> None:
    before = cluster.workers()[worker_id].worker.ref.incarnation
    os.kill(cluster.worker_pid(worker_id), signal.SIGKILL)

    def replaced() -> bool:
        worker = cluster.workers().get(worker_id)
        return worker is not None and worker.worker.ref.incarnation != before and worker.life == "ready"

    wait_until(replaced, 60.0, lambda: str(cluster.status()))


def assert_serves(cluster: RunningCluster, salt: str) -> None:
    """A disaggregated request works, so the new worker is paired; and nothing is left anywhere."""
    answer = cluster.complete(
        list(SHORT.prompt_ids), max_tokens=64, cache_salt=salt, tandem={"prefill": "remote"}, timeout_s=60
    )
    assert tuple(answer["choices"][0]["token_ids"]) == SHORT.output_ids
    assert answer["usage"]["tandem"]["kv_blocks_moved"] == 1
    cluster.wait_idle(LEASE_S + 10)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 11, "n": 2, "presence_penalty": 0.5, "repetition_penalty": 1.1, "min_p": 0.01},
    ],
    ids=["greedy", "two sampled choices with penalties"],
)
def test_a_stream_outlives_its_decode_worker(cluster: RunningCluster, fields: dict[str, Any]) -> None:
    """The prefill worker stands in for it, and it says what it would have said: each token once."""
    fields = {"max_tokens": 250, "ignore_eos": True, **fields}
    undisturbed = Streaming(cluster, SHORT.prompt_ids, **fields, cache_salt="undisturbed")
    undisturbed.join(60)
    stream = Streaming(cluster, SHORT.prompt_ids, **fields, cache_salt="kill-decode")
    wait_until(lambda: len(stream.token_ids) > 5, 60.0)
    log = next(cluster.folder.glob("run/*/logs/router.log"))
    stood_in = log.read_text().count("decode=prefill-0@")
    kill_and_wait_for_the_next_life(cluster, "decode-0")
    assert log.read_text().count("decode=prefill-0@") > stood_in
    stream.join(60)
    assert stream.error is None and stream.done
    assert stream.outputs == undisturbed.outputs
    assert {len(output) for output in stream.outputs.values()} == {250}
    assert_serves(cluster, f"after-decode-{fields['temperature']}")


def test_prefill_worker_killed_mid_prefill(cluster: RunningCluster) -> None:
    """Before the first token nothing is lost: the request is planned again and says what it would have said."""
    stream = Streaming(cluster, PROSE.prompt_ids, max_tokens=16, cache_salt="kill-prefill")
    wait_until(lambda: 0 < cluster.workers()["prefill-0"].load.waiting_tokens < 1400, 60.0)
    kill_and_wait_for_the_next_life(cluster, "prefill-0")
    stream.join(120)
    assert stream.error is None
    assert tuple(stream.token_ids) == PROSE.output_ids[:16]
    assert_serves(cluster, "after-prefill")


def test_decode_worker_killed_while_its_prompt_is_computed_elsewhere(cluster: RunningCluster) -> None:
    stream = Streaming(cluster, PROSE.prompt_ids, max_tokens=16, cache_salt="kill-target")
    wait_until(lambda: 0 < cluster.workers()["prefill-0"].load.waiting_tokens < 1400, 60.0)
    kill_and_wait_for_the_next_life(cluster, "decode-0")
    stream.join(120)
    assert stream.error is None
    assert tuple(stream.token_ids) == PROSE.output_ids[:16]
    assert_serves(cluster, "after-target")


def test_a_killed_router_is_replaced_and_its_streams_leave_nothing(cluster: RunningCluster) -> None:
    stream = Streaming(cluster, SHORT.prompt_ids, max_tokens=2000, ignore_eos=True, cache_salt="kill-router")
    wait_until(lambda: len(stream.token_ids) > 5, 60.0)
    os.kill(pid_listening_on(int(cluster.grpc.rpartition(":")[2])), signal.SIGKILL)
    stream.join(30)
    assert not stream.done  # the connection broke: the client sees that, and may ask again

    def back() -> bool:
        try:
            return {item.life for item in cluster.workers().values()} == {"ready"} and len(cluster.workers()) == 2
        except grpc.RpcError:
            return False

    wait_until(back, 60.0)
    assert_serves(cluster, "after-router")
