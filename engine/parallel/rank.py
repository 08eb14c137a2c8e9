"""One rank's process: it computes its shard of every step that its leader plans, and decides nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import Final, Protocol

import torch

from engine.models.decoder import Gather
from engine.parallel.group import Group
from engine.parallel.shard import Shard
from engine.step import StepPlan

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
BEAT_S: Final = 0.5


class ShardRunner(Protocol):
    """Computes one shard of steps over one rank's pool."""

    def follow(self, plan: StepPlan) -> None:
        """Copy blocks and write the KV of every slice, as ModelRunner.run; draw nothing. Over when it is written."""
        ...


# (shard, the rank's KV pool, how it gets whole rows) to its runner. Loads weights; all ranks' calls gather alike.
MakeShardRunner = Callable[[Shard, torch.Tensor, Gather], ShardRunner]


def serve_rank(
    shard: Shard,
    make: MakeShardRunner,
    pool: torch.Tensor,
    meeting_file: str,
    timeout_s: float,
    leader: Connection,
    beats: Connection,
) -> None:
    """The process's whole life. `leader` says plans, and hears None for each that is done, and once at first. `beats`
    hears, whatever is computed, that this process is not frozen."""
    _end_with_leader()
    threading.Thread(target=_beat, args=(beats,), name="beats", daemon=True).start()
    group = Group(shard, meeting_file, pool.device, timeout_s)
    runner = make(shard, pool, group.gather)
    with suppress(EOFError):  # the leader is gone
        leader.send(None)
        while True:
            runner.follow(leader.recv())
            leader.send(None)


def _beat(beats: Connection) -> None:
    with suppress(OSError):  # the leader is gone
        while True:
            beats.send_bytes(b".")
            time.sleep(BEAT_S)


def _end_with_leader() -> None:
    """The kernel kills this process with the thread that started it. Signals to the leader's group are the leader's."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
    parent = parent_process()
    if parent is not None and os.getppid() != parent.pid:  # gone before the call
        os._exit(1)
