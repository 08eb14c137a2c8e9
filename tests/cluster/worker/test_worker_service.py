"""A router's stream, on both of its ends: however it ends, the worker lives and its requests are given back."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc

from cluster.worker.router_streams import MAX_UNWRITTEN, RouterStream, RouterStreams
from cluster.worker.service import WorkerServicer
from core.handoff import HandoffTicket
from core.membership import GivenWork, WorkerLoad, WorkerRef
from core.messages import CancelRequest, Command, ReserveBlocks, Reserved, StartGeneration, StartPrefill, Turn
from core.request import GenerateRequest, SamplingParams, StopConditions, TokenDelta
from engine.block_pool import BlockPool
from engine.cache_changes import CacheChanges
from kv_transfer.membership_codec import encode_ref
from kv_transfer.stream_codec import encode_command
from telemetry.tasks import BackgroundTasks

ME = WorkerRef("decode-0", "1")
NO_CHANGES = CacheChanges((), ())
REQUEST = GenerateRequest("r", (1, 2, 3), SamplingParams(), StopConditions(max_tokens=4))


class Worker:
    """What a servicer is given, remembered."""

    def __init__(self) -> None:
        self.streams = RouterStreams(BlockPool(1), lambda _request_id: True)
        self.commands: list[object] = []
        self.commanded = asyncio.Event()
        self.orphans: list[str] = []
        self.closed = asyncio.Event()
        self.broken: list[BaseException] = []
        self.tasks = BackgroundTasks(self.broken.append)

    def servicer(self) -> WorkerServicer:
        return WorkerServicer(
            ME,
            None,  # type: ignore[arg-type]
            self.streams,
            on_open=lambda: self.streams.step((), WorkerLoad(), NO_CHANGES),
            on_command=self._command,
            on_closed=self._closed,
            spawn=self.tasks.spawn,
        )

    def _command(self, stream: RouterStream, command: Command) -> None:
        self.commands.append(command)
        self.commanded.set()
        if isinstance(command, StartGeneration):
            self.streams.own(stream, command)

    def _closed(self, request_ids: list[str]) -> None:
        self.orphans += request_ids
        self.closed.set()


@asynccontextmanager
async def connected(worker: Worker, router_id: str = "router-0") -> AsyncIterator[Any]:
    """An open stream of a router, which has said hello and heard the load."""
    server = grpc.aio.server()
    pb_grpc.add_WorkerServiceServicer_to_server(worker.servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        options = (("grpc.enable_http_proxy", 0),)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            stream = pb_grpc.WorkerServiceStub(channel).Connect()
            await stream.write(pb.ConnectRequest(hello=pb.RouterHello(router_id=router_id, worker=encode_ref(ME))))
            assert (await stream.read()).HasField("step")
            yield stream
    finally:
        await server.stop(grace=0)


async def ended(worker: Worker) -> None:
    await asyncio.wait_for(worker.closed.wait(), 5)
    await worker.tasks.settle(timeout_s=5)
    assert worker.broken == []


@pytest.mark.parametrize("how", ["half-closed", "cancelled", "not a command"])
async def test_the_end_of_a_routers_stream_does_not_end_the_worker(how: str) -> None:
    worker = Worker()
    async with connected(worker) as stream:
        await stream.write(encode_command(CancelRequest("r")))
        if how == "cancelled":
            stream.cancel()
        elif how == "half-closed":
            await stream.done_writing()
            assert await asyncio.wait_for(stream.read(), 5) is grpc.aio.EOF
        else:
            await stream.write(pb.ConnectRequest())
            assert await asyncio.wait_for(stream.read(), 5) is grpc.aio.EOF
        await ended(worker)


async def test_a_router_that_greets_anew_wants_nothing_of_its_earlier_stream() -> None:
    """It lost us by a partition, say; we may hear of the broken stream minutes later. Another router's is untouched."""
    worker = Worker()
    async with connected(worker) as first, connected(worker, "router-1") as other:
        for stream, name in ((first, "a"), (other, "b")):
            await stream.write(encode_command(StartGeneration(replace(REQUEST, request_id=name))))
        async with asyncio.timeout(5):
            while not (worker.streams.owns("a") and worker.streams.owns("b")):
                await worker.commanded.wait()
                worker.commanded.clear()
        async with connected(worker):
            assert worker.orphans == ["a"] and not worker.streams.owns("a")
            async with asyncio.timeout(5):
                while (message := await first.read()) is not grpc.aio.EOF:
                    assert message.HasField("step")
            assert worker.streams.owns("b")
    assert worker.broken == []


def test_each_router_is_told_what_the_others_gave() -> None:
    streams = RouterStreams(BlockPool(1), lambda _request_id: True)
    (one, _), (two, _) = streams.open("router-0"), streams.open("router-1")

    def others(*deltas: TokenDelta) -> list[GivenWork]:
        streams.step(deltas, WorkerLoad(), NO_CHANGES)
        return [stream.outbox.get_nowait().others for stream in (one, two)]

    nothing = GivenWork()
    assert others() == [nothing, nothing]
    streams.own(one, StartGeneration(replace(REQUEST, request_id="a")))
    streams.own(one, ReserveBlocks(replace(REQUEST, request_id="b"), "b", ME))
    streams.own(two, StartPrefill(replace(REQUEST, request_id="c"), HandoffTicket("c", ME, 1, 0, ())))
    assert others() == [GivenWork(1, 3, 3), GivenWork(2, 6, 3, 6)]
    streams.send(Reserved("b", HandoffTicket("b", ME, 1, 0, ())))  # it has its KV blocks
    assert isinstance(one.outbox.get_nowait(), Reserved)
    assert others() == [GivenWork(1, 3, 3), GivenWork(2, 6, 3, 3)]
    assert others(TokenDelta("a", 0, (7,)), TokenDelta("b", 0, (7,))) == [GivenWork(1, 3, 3), GivenWork(2, 6)]
    streams.disown("a")
    assert streams.close(two) == ["c"] and streams.close(two) == []
    streams.step((), WorkerLoad(), NO_CHANGES)
    assert one.outbox.get_nowait().others == nothing
    assert streams.close(one) == ["b"]


def test_each_router_is_told_once_what_began_at_the_others() -> None:
    """A request where it is decoded, and none that goes on from earlier tokens: it had its turn before."""
    streams = RouterStreams(BlockPool(1), lambda _request_id: True)
    (one, _), (two, _) = streams.open("router-0"), streams.open("router-1")
    streams.own(one, StartGeneration(replace(REQUEST, request_id="a", tenant="acme", priority=2, num_choices=3)))
    streams.own(one, StartGeneration(replace(REQUEST, request_id="b", output_token_ids=(7,))))
    streams.own(two, ReserveBlocks(replace(REQUEST, request_id="c"), "c", ME))
    streams.own(two, StartPrefill(replace(REQUEST, request_id="d"), HandoffTicket("d", ME, 1, 0, ())))

    def told() -> list[tuple[Turn, ...]]:
        streams.step((), WorkerLoad(), NO_CHANGES)
        return [stream.outbox.get_nowait().turns for stream in (one, two)]

    num_tokens = REQUEST.num_prompt_tokens
    assert told() == [(Turn("", False, 1, num_tokens),), (Turn("acme", True, 3, num_tokens),)]
    assert told() == [(), ()]


def test_each_router_is_told_which_of_its_prompts_a_step_computes_and_which_wait() -> None:
    in_line = {"a", "b", "c"}
    streams = RouterStreams(BlockPool(1), in_line.__contains__)
    (one, _), (two, _) = streams.open("router-0"), streams.open("router-1")
    for stream, name in ((one, "a"), (one, "b"), (two, "c"), (two, "not yet")):
        streams.own(stream, StartGeneration(replace(REQUEST, request_id=name)))

    def said(stream: RouterStream) -> list[tuple[set[str], set[str]]]:
        answers: list[Any] = [stream.outbox.get_nowait() for _ in range(stream.outbox.qsize())]
        return [(set(it.computing), set(it.in_line)) for it in answers]

    assert streams.computes(["a"], WorkerLoad) == [one]
    assert (said(one), said(two)) == ([({"a"}, {"a", "b"})], [])
    assert streams.computes(["a"], WorkerLoad) == [] and said(one) == []  # its next chunk
    assert streams.behind
    streams.step([TokenDelta("a", 0, (7,))], WorkerLoad(), NO_CHANGES)
    assert (said(one), said(two)) == ([({"a"}, set())], [(set(), {"c"})])
    assert not streams.behind
    in_line.add("not yet")
    assert streams.behind
    assert set(streams.computes(["b", "c"], WorkerLoad)) == {one, two}
    assert (said(one), said(two)) == ([({"b"}, set())], [({"c"}, {"not yet"})])
    assert streams.computes([], WorkerLoad) == []  # nobody waits for that: what was left out was preempted
    assert (said(one), said(two)) == ([(set(), set())], [(set(), set())])
    for _ in range(MAX_UNWRITTEN):
        streams.step((), WorkerLoad(), NO_CHANGES)
    assert streams.computes(["b"], WorkerLoad) == []  # a router that reads nothing


@pytest.mark.parametrize("how", ["wait", "at-once"])
async def test_whose_prompt_a_worker_dies_of_is_known_once_it_was_written(how: str) -> None:
    script = Path(__file__).with_name("tell_and_die.py")
    worker = await asyncio.create_subprocess_exec(sys.executable, script, how, stdout=asyncio.subprocess.PIPE)
    assert worker.stdout is not None
    address, computing = f"127.0.0.1:{int(await worker.stdout.readline())}", set[str]()
    async with grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        stream = pb_grpc.WorkerServiceStub(channel).Connect()
        await stream.write(pb.ConnectRequest(hello=pb.RouterHello(router_id="r", worker=encode_ref(ME))))
        await stream.write(encode_command(StartGeneration(REQUEST)))
        with pytest.raises(grpc.aio.AioRpcError):
            while True:
                computing |= set((await stream.read()).step.computing.request_ids)
    assert await worker.wait() == -signal.SIGKILL
    assert computing == ({"r"} if how == "wait" else set())


async def test_a_router_that_says_nothing_for_long_has_nothing_here_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is frozen keeps its stream open: the kernel answers for it."""
    monkeypatch.setattr("cluster.worker.service.ROUTER_SILENCE_S", 2.0)  # longer than a busy machine stands still
    worker = Worker()
    async with connected(worker) as silent, connected(worker, "router-1") as living:
        for stream, name in ((silent, "a"), (living, "b")):
            await stream.write(encode_command(StartGeneration(replace(REQUEST, request_id=name))))
        async with asyncio.timeout(10):
            while not worker.orphans:
                await living.write(pb.ConnectRequest(heartbeat=pb.Heartbeat()))
                await asyncio.sleep(0.01)
        assert worker.orphans == ["a"] and worker.streams.owns("b")
        async with asyncio.timeout(5):
            while (message := await silent.read()) is not grpc.aio.EOF:
                assert message.HasField("step")
    assert worker.broken == []
