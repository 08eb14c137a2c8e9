"""Faults on a live cluster of this machine, each with a check: what clients saw equals an undisturbed run, nobody holds
a block any more, whoever was ended is back. What it does to a cluster is what the tests do to theirs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from tandem.v1 import worker_pb2

from cluster import processes
from cluster.api_key import key_headers
from cluster.completion import PROMPT, completion
from cluster.http_reply import first_model
from cluster.self_check import settled_blocks
from cluster.status_client import fetch_status
from core.errors import BadRequest, CommandFailed
from core.membership import Life

NUM_STREAMS: Final = 4
NUM_TOKENS: Final = 200
POLL_S: Final = 0.02
REQUEST_TIMEOUT_S: Final = 180.0
RETURN_TIMEOUT_S: Final = 120.0
LINE: Final = "{number}. A prompt that takes its time to compute and to move.\n"
LINE_TOKENS: Final = 18  # at most, of the default model's tokenizer
MOST_LINES: Final = 120
LEAST_LINES: Final = 30  # of fewer, the last block is there before anybody can leave
LOOPBACK: Final = ("127.0.0.1:", "localhost:", "[::1]:")


@dataclass(frozen=True, slots=True)
class DrillTarget:
    """A cluster's addresses: `http_url`, and host:port of registry and controller, on this machine."""

    http_url: str
    registry: str
    controller: str

    def __post_init__(self) -> None:
        addresses = {"--url": self.http_url.partition("://")[2] + ":", "--registry": self.registry}
        for flag, address in (addresses | {"--controller": self.controller}).items():
            if not address.startswith(LOOPBACK):
                raise BadRequest(flag, f"{address.rstrip(':')} is not on this machine, whose processes this ends")


@dataclass(slots=True)
class _Stream:
    """One streamed completion: its tokens, and the longest time between two of them."""

    tokens: list[int] = field(default_factory=list)
    longest_gap_s: float = 0.0
    last_s: float = float("inf")

    def add(self, token_ids: list[int]) -> None:
        now = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now - self.last_s)
        self.last_s = now
        self.tokens += token_ids


class Drill:
    """`run` does it all. Raises CommandFailed: what is not as it must be."""

    def __init__(self, target: DrillTarget, say: Callable[[str], None]) -> None:
        self._target = target
        self._say = say
        self._model = self._long_prompt = ""
        self._expected: list[int] = []

    async def run(self) -> None:
        """Each fault, and its figures."""
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with aiohttp.ClientSession(headers=key_headers(), timeout=timeout) as self._session:
            await self._look_at_model()
            undisturbed = _Stream()
            await self._follow(undisturbed)
            self._expected = undisturbed.tokens
            for name, fault in (
                ("a decode worker is killed mid-stream", lambda: self._end_a_worker(signal.SIGKILL)),
                ("a client leaves mid-transfer", self._leave),
                ("a decode worker restarts", lambda: self._end_a_worker(signal.SIGTERM)),
                ("Redis stands still", self._stop_redis),
            ):
                await self._check(name, fault)

    async def _look_at_model(self) -> None:
        """Its name, and a prompt that fits its context: what does not is refused before anything is killed."""
        model = await asyncio.to_thread(first_model, self._target.http_url)
        context_tokens = model.get("max_model_len")
        if not isinstance(context_tokens, int):
            raise CommandFailed(f"{self._target.http_url} is no front of Tandem's: its model has no max_model_len")
        num_lines = min(MOST_LINES, (context_tokens - NUM_TOKENS) // LINE_TOKENS)
        if num_lines < LEAST_LINES:
            raise CommandFailed(f"a context of {context_tokens} tokens (num_blocks) is too short for a drill")
        self._model = model["id"]
        self._long_prompt = "".join(LINE.format(number=number) for number in range(num_lines))

    async def _check(self, name: str, fault: Callable[[], Awaitable[str]]) -> None:
        figures = await fault()
        held = await settled_blocks(self._target.registry)
        if held:
            raise CommandFailed(f"{name}: {held} blocks stayed behind")
        self._say(f"PASS  {name}: {figures}, 0 orphaned blocks")

    async def _end_a_worker(self, number: signal.Signals) -> str:
        """A decode worker that has streams."""
        async with self._streams() as streams:
            busy = [item for item in await self._decodes() if item.load.running_requests]
            if not busy:
                raise CommandFailed("no decode worker says that it runs anything")
            worker = busy[0].worker
            os.kill(_process_at(worker.address).pid, number)
            ended_s = time.monotonic()
        figures = self._equal(streams)
        while not any(_is_next_life(item, worker) for item in await self._decodes()):
            if time.monotonic() - ended_s > RETURN_TIMEOUT_S:
                raise CommandFailed(f"{worker.ref.worker_id} did not come back within {RETURN_TIMEOUT_S:g} s")
            await asyncio.sleep(POLL_S)
        return f"{figures}, {worker.ref.worker_id} was back after {time.monotonic() - ended_s:.1f} s at most"

    async def _leave(self) -> str:
        """While its prompt is computed, and its blocks are on their way."""
        workers = (await fetch_status(self._target.registry)).workers
        if not any(item.worker.role == worker_pb2.ROLE_PREFILL and item.life == Life.READY for item in workers):
            return "left out: no prefill worker is ready"
        leaving = asyncio.create_task(self._follow(_Stream(), self._long_prompt, prefill="remote"))
        while not any(item.load.waiting_tokens for item in (await fetch_status(self._target.registry)).workers):
            if leaving.done():
                await leaving
                raise CommandFailed("the prompt was computed before anybody could leave")
            await asyncio.sleep(POLL_S)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        left_s = time.monotonic()
        while (await fetch_status(self._target.registry)).open_requests:
            if time.monotonic() - left_s > RETURN_TIMEOUT_S:
                raise CommandFailed("the request of a client that left stays open")
            await asyncio.sleep(POLL_S)
        return f"nothing was open any more after {time.monotonic() - left_s:.2f} s"

    async def _stop_redis(self) -> str:
        """The embedded one, and only that."""
        launcher = _process_at(self._target.controller)
        found = [it for it in processes.descendants(launcher.pid) if "valkey" in processes.command_of(it).split(" ")[0]]
        if len(found) != 1:
            return "left out: it is not embedded"
        os.kill(found[0].pid, signal.SIGSTOP)
        try:
            async with self._streams() as streams:
                pass
        finally:
            os.kill(found[0].pid, signal.SIGCONT)
        return self._equal(streams)

    @asynccontextmanager
    async def _streams(self) -> AsyncIterator[list[_Stream]]:
        """Streams under way; at the end of the block they have ended."""
        streams = [_Stream() for _ in range(NUM_STREAMS)]
        tasks = [asyncio.create_task(self._follow(stream)) for stream in streams]
        try:
            # Each is looked at: one event would have to know them all.
            while any(len(stream.tokens) < 4 for stream in streams) and not any(task.done() for task in tasks):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            yield streams
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _equal(self, streams: list[_Stream]) -> str:
        equal = sum(stream.tokens == self._expected for stream in streams)
        if equal < len(streams):
            raise CommandFailed(f"{len(streams) - equal} of {len(streams)} streams differ from the undisturbed run")
        return f"{equal} of {equal} streams equal, longest gap {max(it.longest_gap_s for it in streams):.2f} s"

    async def _follow(self, stream: _Stream, prompt: str = PROMPT, prefill: str = "auto") -> None:
        """One greedy completion."""
        url, model = self._target.http_url, self._model
        async with completion(self._session, url, model, prompt, prefill, NUM_TOKENS, stream=True) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    _read(json.loads(line[6:]), stream)

    async def _decodes(self) -> list[worker_pb2.WorkerStatus]:
        status = await fetch_status(self._target.registry)
        return [item for item in status.workers if item.worker.role == worker_pb2.ROLE_DECODE]


def _read(chunk: dict[str, Any], stream: _Stream) -> None:
    if "error" in chunk:
        raise CommandFailed(f"a stream broke off: {chunk['error'].get('message')}")
    for choice in chunk["choices"]:
        stream.add(choice.get("token_ids", []))


def _is_next_life(item: worker_pb2.WorkerStatus, before: worker_pb2.WorkerInfo) -> bool:
    now, then = item.worker.ref, before.ref
    return now.worker_id == then.worker_id and now.incarnation != then.incarnation and item.life == Life.READY


def _process_at(address: str) -> processes.Process:
    """Raises: CommandFailed: nobody of this machine listens there."""
    process = processes.listening_on(int(address.rpartition(":")[2])) if address.startswith(LOOPBACK) else None
    if process is None:
        raise CommandFailed(f"no process that we may end listens on {address}")
    return process
