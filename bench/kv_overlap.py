"""How much of a hand-off's time a client waits for: prompts prefilled here, their KV pushed to another process.

    python -m bench.kv_overlap [--rounds 3] [--prompts 256,512,1024,2048] [--dtype float32] [--token-budget 256]

Real engine, scheduler, sessions, driver, checksums and NIXL; the other process is a target that decodes nothing. With
overlap each chunk's blocks are pushed while the next chunk computes; without it all are pushed when the prompt is done.
Exposed is what passes between the first token and the target's Landed. Rounds of both in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import pickle
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cluster.folders import default_model_folder
from cluster.worker.config import WorkerConfig
from cluster.worker.engine import Engine, build_engine
from cluster.worker.kv_memory import memory_of
from core.handoff import HandoffTicket
from core.identity import CacheIdentity
from core.membership import Role, WorkerRef
from core.request import GenerateRequest, SamplingParams, StopConditions
from engine.block_pool import BlockPool
from engine.loop import EngineLoop, StepReport
from engine.step import Progress
from kv_transfer.checksum import BlockChecksums
from kv_transfer.credit import PushCredit
from kv_transfer.driver import HandoffDriver, HandoffOutcome
from kv_transfer.effects import LeaseConfig, TargetLanded
from kv_transfer.nixl import NixlTransport
from kv_transfer.pace import TransferPace
from kv_transfer.pool import MemoryPool
from kv_transfer.session import HandoffSessions
from prefill_worker.session import PrefillConfig, PrefillSession

NUM_BLOCKS: Final = 300
BOUND_S: Final = 120.0


def make_driver(
    transport: NixlTransport, memory: MemoryPool, pool: BlockPool, on_outcome: Any
) -> tuple[HandoffSessions, HandoffDriver]:
    pace = TransferPace(memory.block_bytes)
    sessions = HandoffSessions(transport.describe().ref, pool, LeaseConfig(), pool.match, pace.bound_s)
    credit, checksums = PushCredit(memory.block_bytes, 64 << 20), BlockChecksums(memory)
    return sessions, HandoffDriver(transport, sessions, time.monotonic, on_outcome, broken, credit, pace, checksums)


def broken(error: BaseException) -> None:
    print(f"broken: {error!r}", file=sys.stderr, flush=True)
    os._exit(1)


def encode(value: object) -> bytes:
    return base64.b64encode(pickle.dumps(value)) + b"\n"


async def tick_forever(driver: HandoffDriver) -> None:
    while True:
        await asyncio.sleep(0.1)
        driver.tick()


# --- the other process ---


async def be_target() -> None:
    """Answers each line (hand-off id, first block, number of blocks) with a ticket, then with the time it landed."""
    block_bytes, identity, source = pickle.loads(base64.b64decode(await asyncio.to_thread(sys.stdin.readline)))
    blocks = np.zeros((NUM_BLOCKS, block_bytes), dtype=np.uint8)
    memory, pool = MemoryPool((blocks.ctypes.data,), NUM_BLOCKS, block_bytes), BlockPool(NUM_BLOCKS)
    transport = NixlTransport(WorkerRef("decode-0", str(os.getpid())), identity, memory)

    def ended(outcome: HandoffOutcome) -> None:
        landed_s = time.monotonic()
        assert isinstance(outcome, TargetLanded) and outcome.num_intact == len(outcome.blocks), outcome
        pool.release(outcome.blocks)
        say(landed_s)

    def say(value: object) -> None:
        sys.stdout.buffer.write(encode(value))
        sys.stdout.buffer.flush()

    sessions, driver = make_driver(transport, memory, pool, ended)
    say(transport.describe())
    await driver.connect(source)
    ticking = asyncio.ensure_future(tick_forever(driver))
    while line := await asyncio.to_thread(sys.stdin.readline):
        handoff_id, num_blocks = pickle.loads(base64.b64decode(line))
        pages = pool.allocate(num_blocks)
        assert pages is not None
        say(sessions.target.reserve(handoff_id, source.ref, 0, tuple(pages), time.monotonic()))
    ticking.cancel()


# --- this process ---


@dataclass(frozen=True, slots=True)
class Handoff:
    """In seconds from the prompt's start."""

    first_token_s: float
    landed_s: float

    @property
    def exposed_share(self) -> float:
        """Of the time to the first token."""
        return (self.landed_s - self.first_token_s) / self.first_token_s


class Source:
    """A prefill worker without a router."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.memory = memory_of(engine.runner.kv_pools, engine.pool.num_blocks)
        self.transport = NixlTransport(WorkerRef("prefill-0", str(os.getpid())), engine.identity, self.memory)
        self.sessions, self.driver = make_driver(self.transport, self.memory, engine.pool, lambda _outcome: None)
        # No prompt is ever seen twice, and no other worker has any of it.
        config = PrefillConfig(engine.block_bytes, min_fetch_blocks=NUM_BLOCKS)
        self.session = PrefillSession(config, engine.scheduler, self.sessions)
        self.loop = EngineLoop(engine.scheduler, engine.runner, self._stepped)
        self.first_token: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._blocks_ready = self.sessions.source.blocks_ready

    def overlap(self, on: bool) -> None:
        """Off: what the sessions say of blocks is kept back until the prompt's last ones are there."""

        def last_only(*arguments: Any, last: bool, **options: Any) -> Any:
            return self._blocks_ready(*arguments, last=True, **options) if last else []

        self.sessions.source.blocks_ready = self._blocks_ready if on else last_only  # type: ignore[method-assign]

    def start(self, request: GenerateRequest, ticket: HandoffTicket) -> None:
        self.first_token = asyncio.get_running_loop().create_future()
        self.driver.perform(self.session.start(request, ticket, time.monotonic()))  # type: ignore[arg-type]
        self.loop.wake()

    def _stepped(self, progress: list[Progress], _report: StepReport) -> None:
        deltas, effects = self.session.progressed(progress, time.monotonic())
        self.driver.perform(effects)  # type: ignore[arg-type]
        if deltas:
            self.first_token.set_result(time.monotonic())


class Bench:
    def __init__(self, source: Source, target: asyncio.subprocess.Process) -> None:
        self.source, self.target = source, target
        self._draw = np.random.default_rng(0)
        self._num_requests = 0

    async def hear(self) -> Any:
        assert self.target.stdout is not None
        return pickle.loads(base64.b64decode(await self.target.stdout.readline()))

    def say(self, value: object) -> None:
        assert self.target.stdin is not None
        self.target.stdin.write(encode(value))

    async def hand_off(self, num_tokens: int, overlap: bool) -> Handoff:
        self._num_requests += 1
        block_size = self.source.engine.scheduler.limits.block_size
        prompt = tuple(self._draw.integers(1000, 20000, num_tokens).tolist())
        request = GenerateRequest(f"r{self._num_requests}", prompt, SamplingParams(0.0), StopConditions(max_tokens=8))
        self.say((request.request_id, -(-num_tokens // block_size)))
        ticket = await self.hear()
        self.source.overlap(overlap)
        started_s = time.monotonic()  # one clock for all processes of a machine
        self.source.start(request, ticket)
        async with asyncio.timeout(BOUND_S):
            first_token_s = await self.source.first_token
            landed_s = await self.hear()
        return Handoff(first_token_s - started_s, landed_s - started_s)


async def run(prompts: list[int], rounds: int, dtype: str, token_budget: int) -> None:
    config = WorkerConfig(
        worker_id="prefill-0", incarnation="bench", role=Role.PREFILL, model_folder=default_model_folder(),
        router_addresses=("none",), dtype=dtype, num_blocks=NUM_BLOCKS, token_budget=token_budget,
    )  # fmt: skip
    source = Source(await asyncio.to_thread(build_engine, config))
    target = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.kv_overlap", "--target",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    bench = Bench(source, target)
    identity: CacheIdentity = source.engine.identity
    bench.say((source.memory.block_bytes, identity, source.transport.describe()))
    link = await source.driver.connect(await bench.hear())
    stepping, ticking = source.loop.start(), asyncio.ensure_future(tick_forever(source.driver))
    print(f"{dtype}, lane {link.lane}, chunks of {config.token_budget}, load average {os.getloadavg()[0]:.1f}")
    print("| prompt | KV MiB | TTFT s | exposed ms, overlap | share of TTFT | exposed ms, none | share of TTFT |")
    print("| --- " * 7 + "|")
    await bench.hand_off(prompts[0], True)  # warms
    for num_tokens in prompts:
        seen: dict[bool, list[Handoff]] = {True: [], False: []}
        for _ in range(rounds):
            for overlap in seen:
                seen[overlap].append(await bench.hand_off(num_tokens, overlap))
        cells = [
            f"{num_tokens}",
            f"{num_tokens // 16 * source.memory.block_bytes >> 20}",
            f"{statistics.median(item.first_token_s for items in seen.values() for item in items):.2f}",
        ]
        for items in seen.values():
            exposed_s = statistics.median(item.landed_s - item.first_token_s for item in items)
            cells += [f"{exposed_s * 1e3:.1f}", f"{statistics.median(item.exposed_share for item in items):.2%}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    for task in (stepping, ticking):
        task.cancel()
    await source.loop.stop()
    assert target.stdin is not None
    target.stdin.close()
    await source.driver.close(1.0)
    target.kill()
    await target.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", default="256,512,1024,2048", help="their lengths in tokens")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--token-budget", type=int, default=256, help="tokens of a chunk; a last block alone: 16")
    parser.add_argument("--target", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.target:
        asyncio.run(be_target())
    else:
        prompts = [int(text) for text in arguments.prompts.split(",")]
        asyncio.run(run(prompts, arguments.rounds, arguments.dtype, arguments.token_budget))


if __name__ == "__main__":
    main()
