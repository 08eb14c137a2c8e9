"""The processes that compute with a worker, from the worker's side: rank 0, their leader.

1. A thread starts them, each with its shard and its part of the KV pool, which the leader has allocated.
2. Each joins the group, makes its runner, and says that it is ready.
3. Each step: all are told the plan, compute it beside the leader, and say that their KV is written.
4. The thread sees one end, or stand still (it beats no more), or a step that takes too long: then all are killed, which
   ends whatever waits for them, and the owner is told.
5. They end with the thread, and so with the leader, however that ends: the kernel kills them (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import atexit
import math
import multiprocessing
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Final

import torch

from core.errors import RankLost
from engine.parallel.rank import MakeShardRunner, serve_rank
from engine.parallel.shard import Shard
from engine.step import StepPlan

WATCH_S: Final = 0.5  # at most, between two looks at them
MEETING_S: Final = 5.0  # a leader that starts sees by then that a rank is gone; the meeting itself sees nothing
NOTICE_S: Final = 10.0  # after a broken pipe or gather: a rank closes them a while before its process has ended


class Ranks:
    """Ranks 1 and up. `step` in one thread at a time.

    Args:
        make: makes each rank's runner, in its process; picklable.
        pools: of all ranks, the leader's first; must outlive this.
        meeting_file: see Group.
        start_timeout_s, step_timeout_s: what takes longer is hung. silence_timeout_s: so is a rank that has started and
            does not beat for so long of this process's own time.
        on_lost: told once, from a thread of ours, when a rank has ended or hung; not where `starting` has raised.
    """

    def __init__(
        self,
        make: MakeShardRunner,
        pools: Sequence[torch.Tensor],
        meeting_file: str,
        start_timeout_s: float,
        step_timeout_s: float,
        silence_timeout_s: float,
        on_lost: Callable[[RankLost], None],
    ) -> None:
        self._step_timeout_s = step_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self._on_lost = on_lost
        self._lost: RankLost | None = None
        self._started, self._start_over = False, threading.Event()
        self._noticed = threading.Event()
        self._closing, self._close = multiprocessing.Pipe(duplex=False)
        self._processes: list[SpawnProcess] = []
        self._connections: list[Connection] = []
        self._beats: list[Connection] = []
        self._theirs: list[tuple[Connection, Connection]] = []
        context = multiprocessing.get_context("spawn")
        for rank in range(1, len(pools)):
            ours, theirs = context.Pipe()
            beats, beating = context.Pipe(duplex=False)
            arguments = (Shard(rank, len(pools)), make, pools[rank], meeting_file, start_timeout_s, theirs, beating)
            self._processes.append(context.Process(target=serve_rank, args=arguments, name=f"rank-{rank}", daemon=True))
            self._connections.append(ours)
            self._beats.append(beats)
            self._theirs.append((theirs, beating))
        self._deadline_s = time.monotonic() + start_timeout_s
        self._thread = threading.Thread(target=self._own, name="rank-owner", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # before multiprocessing's own, which would wait for them

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Inside, the leader joins the group and makes its own runner. Over when every rank can compute.

        Raises: RankLost.
        """
        try:
            with self._bounded():
                yield
                self._hear_all()
            self._started = True
        finally:
            self._start_over.set()

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Have the ranks compute `plan`; inside, the leader computes it too. Over when all have written their KV.

        Raises: RankLost: from inside too, where the leader waited for a rank that is gone.
        """
        self._deadline_s = time.monotonic() + self._step_timeout_s
        with self._bounded():
            for connection in self._connections:
                connection.send(plan)
            yield
            self._hear_all()

    def close(self) -> None:
        """Kill them and wait until they are gone. Idempotent."""
        atexit.unregister(self.close)
        self._close.close()
        self._thread.join()

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Until the deadline; then the thread kills the ranks, and what waits for them fails."""
        try:
            yield
        except (OSError, EOFError, RuntimeError):
            if self._noticed.wait(NOTICE_S) and self._lost is not None:
                raise self._lost from None
            raise
        self._deadline_s = math.inf

    def _hear_all(self) -> None:
        for connection in self._connections:
            connection.recv()

    def _own(self) -> None:
        """The thread. It forks the ranks, so it must live as long as they do."""
        try:
            self._watch()
        except Exception as error:  # a rank that cannot be started
            self._lose(f"{type(error).__name__}: {error}")
        for process in self._processes:
            if process.pid is not None:
                process.kill()
                process.join()

    def _watch(self) -> None:
        for process, theirs in zip(self._processes, self._theirs, strict=True):
            process.start()
            for connection in theirs:
                connection.close()  # so that its end is the end of the connection
        rank_of = {process.sentinel: rank for rank, process in enumerate(self._processes, start=1)}
        pulse = _Pulse(self._beats)
        while True:
            found = wait([*rank_of, self._closing, *pulse.connections], timeout=WATCH_S)
            if self._closing in found:
                return
            if ended := [rank for sentinel, rank in rank_of.items() if sentinel in found]:
                process = self._processes[min(ended) - 1]
                process.join()
                self._lose(f"rank {min(ended)} ended with exit code {process.exitcode}")
                return
            if pulse.longest_silence_s(found) > self._silence_timeout_s and self._started:
                self._lose("a rank stands still")
                return
            if time.monotonic() > self._deadline_s:
                self._lose("a rank hangs")
                return

    def _lose(self, problem: str) -> None:
        """Killed first: whatever waits for them ends."""
        for process in self._processes:
            if process.pid is not None:
                process.kill()
        self._lost = RankLost(problem)
        self._noticed.set()
        if not self._start_over.wait(MEETING_S) or self._started:
            self._on_lost(self._lost)


class _Pulse:
    """How long ranks have been silent, of this process's own time: while it stands still itself, nobody is."""

    def __init__(self, beats: Iterable[Connection]) -> None:
        self._silent_s = dict.fromkeys(beats, 0.0)
        self._looked_s = time.monotonic()

    @property
    def connections(self) -> list[Connection]:
        return list(self._silent_s)

    def longest_silence_s(self, found: Container[object]) -> float:
        """found: connections that have something to read. One that has ended is not looked at any more."""
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, WATCH_S), now_s
        for beats in self.connections:
            self._silent_s[beats] += passed_s
            if beats in found:
                self._silent_s[beats] = 0.0
                try:
                    beats.recv_bytes()
                except (EOFError, OSError):  # it ends: its process will be seen to
                    del self._silent_s[beats]
        return max(self._silent_s.values(), default=0.0)
