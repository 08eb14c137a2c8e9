"""Schedules of requests and faults over worker processes with real NIXL; stands in for router/live.py and the keeper.

The processes live on from schedule to schedule: some are killed and started again, some frozen. After each schedule
all faults end, every client must be over, and every worker must have every block back.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.errors import BadRequest, Rejected
from core.membership import Role, WorkerInfo, WorkerRef
from core.request import GenerateRequest, Placement, SamplingParams, StopConditions
from kv_transfer.faults import TransportFaults
from kv_transfer.pool import PoolDescription
from router.config import DispatcherConfig
from router.dispatcher import Dispatcher
from router.effects import Deliver, Effect, Fail, Send
from router.view import ClusterView
from tests.simulation.chained_kv import undisturbed
from tests.simulation.world_client import Client

ROOT = Path(__file__).resolve().parents[2]
PLACES = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
DISPATCH = DispatcherConfig(max_open_requests=64, queue_timeout_s=10.0, request_timeout_s=1000.0)
BOUND_S = 30.0  # every wait of the machinery is far below: who waits longer waits for ever
START_BOUND_S = 120.0
TICK_S = 0.02
SPREAD_S = 0.08  # the requests of a schedule come within so long
FAULTS_LAST_S = 0.15


class Broken(Exception):
    """A worker ended by itself: what it found."""


class NeverEnds(Exception):
    """A request, or something that a worker holds, outlived every bound."""


@dataclass(eq=False)
class Life:
    """One incarnation of a worker process."""

    process: asyncio.subprocess.Process
    ref: WorkerRef
    role: Role
    writer: asyncio.StreamWriter
    info: WorkerInfo | None = None
    description: PoolDescription | None = None
    dead: bool = False
    left: dict[str, object] | None = None
    asked: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def say(self, *message: object) -> None:
        if not self.dead:
            payload = pickle.dumps(message)
            self.writer.write(len(payload).to_bytes(4, "little") + payload)


class Conductor:
    """Router, keeper, clients and fault injector of one soak."""

    def __init__(self, lane: str, plant: str, log: Any) -> None:
        self._lane, self._plant, self._log = lane, plant, log
        self.view = ClusterView()
        self.dispatcher = Dispatcher(DISPATCH, self.view, "soak")
        self.lives: dict[str, Life] = {}
        self.clients: dict[str, Client] = {}
        self.seen: Counter[str] = Counter()
        self._incarnations = itertools.count(1)
        self._requests = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._spare: tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter] | None = None

    # --- processes ---

    async def start(self, place: str) -> None:
        """Make a spare process the worker of a place, and another spare: loading takes longer than a schedule."""
        if self._spare is None:
            self._spare = await self._load()
        (process, reader, writer), self._spare = self._spare, None
        ref = WorkerRef(place, f"{os.getpid()}-{next(self._incarnations)}")
        life = self.lives[place] = Life(process, ref, PLACES[place], writer)
        life.say(ref, life.role, self._plant)
        self.spawn(self._read(life, reader))
        self._spare = await self._load()

    async def _load(self) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto/python'}"}
        environment.pop("UCX_TLS", None)
        if self._lane == "tcp":
            environment["UCX_TLS"] = "tcp"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.simulation.soak_worker", str(theirs.fileno()),
            pass_fds=[theirs.fileno()], env=environment, stdout=self._log, stderr=self._log, cwd=ROOT,
        )  # fmt: skip
        theirs.close()
        return process, *(await asyncio.open_connection(sock=ours))

    async def kill(self, life: Life) -> None:
        """End a process; then, as the keeper does, say so to all, in any order, and start another in its place."""
        if life.dead or life.info is None:
            return
        life.dead = True
        life.process.kill()
        await life.process.wait()
        life.writer.close()
        self.seen += life.counts
        self.seen["kills"] += 1
        self.perform(self.dispatcher.worker_lost(life.ref, time.monotonic()))
        for other in self.others(life):
            self.later(random.uniform(0, 0.1), lambda other=other: other.say("dead", life.ref))
        await self.start(life.ref.worker_id)

    def others(self, life: Life) -> list[Life]:
        """Who is up: to be told of a worker that joins or dies, and told to one that joins."""
        return [other for other in self.lives.values() if other is not life and other.info and not other.dead]

    async def _read(self, life: Life, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "little")
                self._heard(life, *pickle.loads(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionResetError):
            if not life.dead and await life.process.wait() >= 0:
                raise Broken(f"{life.ref} ended by itself with code {life.process.returncode}") from None

    def _heard(self, life: Life, kind: str, *rest: Any) -> None:
        match kind:
            case "hello":
                life.info, life.description = rest
                self.view.register(rest[0], time.monotonic())
                self.view.ready(life.ref)
                for other in self.others(life):
                    other.say("peer", life.description)
                    life.say("peer", other.description)
            case "answer":
                self.perform(self.dispatcher.answered(life.ref, rest[0], time.monotonic()))
            case "cached":
                for other in self.others(life):
                    other.say("cached", life.ref, *rest)
            case "left":
                if rest[0] == life.asked:
                    life.left = rest[1]
                    life.counts = Counter(rest[2])
            case "broken":
                raise Broken(rest[0])

    # --- router and clients ---

    def perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(worker, command):
                    life = self.lives.get(worker.worker_id)
                    if life is not None and life.ref == worker:
                        life.say("command", command)
                case Deliver(request_id, delta):
                    self.clients[request_id].deliver(delta, time.monotonic())
                case Fail(request_id, error):
                    self.clients[request_id].fail(error)
                    self.seen[f"{type(error).__name__} to clients"] += 1

    def submit(self, client: Client, placement: Placement) -> None:
        self.clients[client.request.request_id] = client
        try:
            self.perform(self.dispatcher.submit(client.request, placement, time.monotonic()))
        except (BadRequest, Rejected) as error:
            client.fail(error)

    def leave(self, client: Client) -> None:
        if not client.over:
            client.left = True
            self.perform(self.dispatcher.cancel(client.request.request_id, time.monotonic()))

    def make_client(self, rng: random.Random) -> Client:
        prefix = range(rng.randrange(3) * 100, 1000)
        prompt = (*prefix[: rng.randrange(41)], *(rng.randrange(1000) for _ in range(rng.randrange(1, 6))))
        request = GenerateRequest(
            request_id=f"r{next(self._requests)}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(seed=rng.randrange(1000)) if rng.random() < 0.5 else SamplingParams(0.0),
            stop=StopConditions(max_tokens=rng.randrange(1, 64 - len(prompt) + 1)),
            cache_salt=rng.choice(["", "", "other"]),
            num_choices=rng.choice([1, 1, 1, 3]),
        )
        return Client(request, [undisturbed(request, choice) for choice in range(request.num_choices)])

    # --- one schedule ---

    async def run(self, seed: int) -> None:
        """Raises what is wrong."""
        rng = random.Random(seed)
        for life in self.lives.values():
            life.say("faults", make_faults(rng), rng.choice([0.0, 0.1]))
        clients = [self.make_client(rng) for _ in range(rng.randrange(4, 10))]
        for client in clients:
            placement = rng.choice([Placement.REMOTE, Placement.REMOTE, Placement.REMOTE, Placement.AUTO])
            at_s = rng.uniform(0, SPREAD_S)
            self.later(at_s, lambda client=client, placement=placement: self.submit(client, placement))
            if rng.random() < 0.3:
                leave_s = at_s + rng.choice([0.0, rng.uniform(0, 0.05), rng.uniform(0, 0.2)])
                self.later(leave_s, lambda client=client: self.leave(client))
        if rng.random() < 0.07:
            victim = self.lives[rng.choice(list(PLACES))]
            self.later(rng.uniform(0, FAULTS_LAST_S), lambda: self.spawn(self.kill(victim)))
        if rng.random() < 0.07:
            frozen = self.lives[rng.choice(list(PLACES))]
            self.later(rng.uniform(0, SPREAD_S), lambda: self.spawn(self.freeze(frozen, rng.uniform(0.1, 0.8))))
        await asyncio.sleep(FAULTS_LAST_S)
        await self.until(lambda: all(client.over for client in clients), lambda: describe(clients))
        await self.settle()
        for client in clients:
            self.seen["requests finished"] += client.finished
            self.seen["clients that left"] += client.left
            del self.clients[client.request.request_id]
        self.seen["schedules"] += 1

    async def settle(self) -> None:
        """Faults end; until every worker is up, connected, and holds nothing."""
        asked = self.seen["schedules"] + 1

        def ask() -> None:
            for life in self.lives.values():
                life.say("faults", TransportFaults(), 0.0)
                life.asked = asked
                life.say("left", asked)

        def settled() -> bool:
            done = all(life.left == {} and life.asked == asked for life in self.lives.values())
            if not done:
                ask()
            return done

        for life in self.lives.values():
            life.left = None
        await self.until(settled, lambda: {str(life.ref): life.left for life in self.lives.values()})

    async def freeze(self, life: Life, seconds: float) -> None:
        if not life.dead:
            self.seen["freezes"] += 1
            life.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(seconds)
            if not life.dead:
                life.process.send_signal(signal.SIGCONT)

    def all_up(self) -> bool:
        return all(life.info is not None for life in self.lives.values())

    async def until(self, condition: Callable[[], bool], what: Callable[[], object], bound_s: float = BOUND_S) -> None:
        deadline_s = time.monotonic() + bound_s
        while not condition():
            if self._error is not None:
                raise self._error
            if time.monotonic() > deadline_s:
                raise NeverEnds(what())
            await asyncio.sleep(TICK_S / 2)
        if self._error is not None:
            raise self._error

    async def tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.perform(self.dispatcher.tick(time.monotonic()))

    def spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and self._error is None:
            self._error = task.exception()

    def later(self, delay_s: float, what: Callable[[], object]) -> None:
        async def act() -> None:
            await asyncio.sleep(delay_s)
            what()

        self.spawn(act())

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        self.seen += sum((life.counts for life in self.lives.values()), Counter())
        ends = [(life.process, life.writer) for life in self.lives.values()]
        if self._spare is not None:
            ends.append((self._spare[0], self._spare[2]))
        for process, writer in ends:
            if process.returncode is None:
                process.kill()
                await process.wait()
            writer.close()


def make_faults(rng: random.Random) -> TransportFaults:
    """Half of the workers have none, so that much lands; the others a mix."""
    if rng.random() < 0.5:
        return TransportFaults()
    return TransportFaults(
        lose_notice=rng.choice([0.0, 0.05]),
        double_notice=rng.choice([0.0, 0.2]),
        late_notice=rng.choice([0.0, 0.2]),
        fail_push=rng.choice([0.0, 0.1]),
        late_push=rng.choice([0.0, 0.4]),
        corrupt_block=rng.choice([0.0, 0.2]),
        break_path=rng.choice([0.0, 0.0, 0.02]),
        late_s=rng.choice([0.02, 0.1, 0.4, 1.2]),  # the last one outlives a death's settling time
        seed=rng.randrange(1 << 30),
    )


def describe(clients: list[Client]) -> object:
    return {client.request.request_id: client.received for client in clients if not client.over}


@asynccontextmanager
async def conducted(lane: str, plant: str) -> AsyncIterator[Conductor]:
    """A conductor with all workers up and connected. What they print is shown when something is wrong."""
    with tempfile.TemporaryFile() as log:
        conductor = Conductor(lane, plant, log)
        try:
            conductor.spawn(conductor.tick_forever())
            for place in PLACES:
                await conductor.start(place)
            await conductor.until(conductor.all_up, lambda: "workers did not start", START_BOUND_S)
            await conductor.settle()
            yield conductor
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-3000:])
            raise
        finally:
            await conductor.close()


async def soak(first_seed: int, num_schedules: int, lane: str, plant: str, say: Callable[[str], None]) -> Counter[str]:
    """Raises what is wrong, with the command that runs the schedule again."""
    async with conducted(lane, plant) as conductor:
        say_at_s = time.monotonic() + 10.0
        for seed in range(first_seed, first_seed + num_schedules):
            try:
                await conductor.run(seed)
            except BaseException as error:
                again = f"python -m tests.simulation.soak --real 1 --first-seed {seed} --lane {lane}"
                again += f" --plant {plant}" if plant else ""
                error.add_note(f"after {seed - first_seed} schedules; reproduce: {again}")
                raise
            if time.monotonic() > say_at_s:
                say_at_s = time.monotonic() + 10.0
                say(f"  {seed - first_seed + 1} schedules")
    return conductor.seen
