"""Two routers over the same two workers: each serves alike, and the death of one costs its own streams alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from tandem.v1 import inference_pb2, inference_pb2_grpc

from cluster.config import ROUTER_PORT_STEP
from tests.acceptance.golden import CASES
from tests.acceptance.running_cluster import RunningCluster, pid_listening_on, running_cluster, wait_until
from tests.acceptance.test_faults import Streaming

SHORT = next(case for case in CASES if case.name == "short")
PREFIX = next(case for case in CASES if case.name == "shared_prefix_b")


@pytest.fixture(scope="module")
def routers(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningCluster]]:
    with running_cluster(model_folder, tmp_path_factory.mktemp("replicas"), "--routers", "2") as first:
        yield [first, replace(first, http=later(first.http), grpc=later(first.grpc), registry=later(first.registry))]


def later(address: str) -> str:
    """The second router's."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + ROUTER_PORT_STEP}"


def grpc_stream(
    router: RunningCluster, codes: list[grpc.StatusCode], num_chars: list[int], timeout_s: float = 120.0
) -> None:
    """A long streamed request; notes its text's lengths as they come, and how it ended."""
    request = inference_pb2.GenerateRequest(text="The capital of France is")
    request.sampling.temperature = 0
    request.stopping.max_tokens = 3900
    request.stopping.ignore_eos = True
    with grpc.insecure_channel(router.grpc, options=(("grpc.enable_http_proxy", 0),)) as channel:
        try:
            responses = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=timeout_s)
            num_chars.extend(len(response.text) for response in responses)
        except grpc.RpcError as error:
            codes.append(error.code())


def incarnations(router: RunningCluster) -> dict[str, str]:
    """Of READY workers."""
    return {name: item.worker.ref.incarnation for name, item in router.workers().items() if item.life == "ready"}


def test_both_serve_alike_and_share_what_is_cached(routers: list[RunningCluster]) -> None:
    computed = []
    for router in routers:
        answer = router.complete(
            list(PREFIX.prompt_ids), max_tokens=64, cache_salt="alike", tandem={"prefill": "remote"}
        )
        assert tuple(answer["choices"][0]["token_ids"]) == PREFIX.output_ids
        computed.append(answer["usage"]["tandem"]["computed_tokens"])
        for other in routers:
            other.wait_idle()
    assert computed[0] == len(PREFIX.prompt_ids)
    assert computed[1] <= 16  # the rest was a hit, though another router had asked for it


def test_a_killed_router_takes_its_own_streams_along_and_no_other(routers: list[RunningCluster]) -> None:
    killed, other = routers
    before = incarnations(other)
    assert set(before) == {"prefill-0", "decode-0"}
    fields = {"max_tokens": 300, "ignore_eos": True}
    undisturbed = Streaming(other, SHORT.prompt_ids, cache_salt="undisturbed", **fields)
    undisturbed.join(60)
    going_on = [Streaming(other, SHORT.prompt_ids, cache_salt=f"other-{number}", **fields) for number in range(2)]
    broken = Streaming(killed, SHORT.prompt_ids, max_tokens=2000, ignore_eos=True, cache_salt="killed")
    codes: list[grpc.StatusCode] = []
    num_chars: list[int] = []
    calling = threading.Thread(target=grpc_stream, args=(killed, codes, num_chars))
    calling.start()
    wait_until(lambda: min(len(num_chars), *(len(it.token_ids) for it in (broken, *going_on))) > 3, 60.0)
    os.kill(pid_listening_on(int(killed.grpc.rpartition(":")[2])), signal.SIGKILL)
    assert not any(stream.done for stream in going_on)
    broken.join(30)
    calling.join(30)
    assert not broken.done and broken.error is None  # the connection broke
    assert codes == [grpc.StatusCode.UNAVAILABLE]  # what a gRPC client may retry
    for stream in going_on:
        stream.join(60)
        assert stream.done and stream.error is None and stream.token_ids == undisturbed.token_ids
    other.wait_idle()

    def back() -> bool:
        try:
            return incarnations(killed) == before
        except grpc.RpcError:
            return False

    wait_until(back, 60.0)
    assert incarnations(other) == before  # no worker ended for it
    answer = killed.complete(
        list(SHORT.prompt_ids), max_tokens=64, cache_salt="back", tandem={"prefill": "remote"}, timeout_s=60
    )
    assert tuple(answer["choices"][0]["token_ids"]) == SHORT.output_ids
    assert answer["usage"]["tandem"]["kv_blocks_moved"] == 1
    killed.wait_idle()
