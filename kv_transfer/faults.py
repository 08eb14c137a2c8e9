"""Faults of a fabric on demand: a transport around any other. For tests, soaks and rehearsals; off unless asked for.

One seed is one sequence of draws. Time comes in by `later`, so that a test can keep its own. What cannot be injected
here is the death of a process: kill one.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Final

from core.errors import BadRequest, TransferFailed, WorkerLost
from core.membership import WorkerRef
from core.messages import PeerConnected
from kv_transfer.pool import PoolDescription
from kv_transfer.transport import LostHandler, NoticeHandler, Transport, TransportStats

Later = Callable[[float, Callable[[], None]], object]  # (seconds, what to do then)

MAX_LATE_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class TransportFaults:
    """Chances in [0, 1] for each notice or push. With the defaults nothing is changed.

    Notices, as they arrive here: lose_notice; double_notice; late_notice, which the ones behind it overtake.
    Pushes, before they leave: fail_push, refused before a byte moved; late_push; corrupt_block, one block's place gets
    another block's bytes. Either: break_path, the peer cannot be reached although both sides live.
    late_s: the most that anything is late, in seconds. seed: of every draw.
    """

    lose_notice: float = 0.0
    double_notice: float = 0.0
    late_notice: float = 0.0
    fail_push: float = 0.0
    late_push: float = 0.0
    corrupt_block: float = 0.0
    break_path: float = 0.0
    late_s: float = 1.0
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> TransportFaults:
        """From "lose_notice=0.1,seed=7". Raises: BadRequest: an unknown name, or a value out of range."""
        known = {item.name for item in fields(cls)}
        values: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in known:
                raise BadRequest("kv_faults", f"{name!r} is not a fault; the faults are {', '.join(sorted(known))}")
            try:
                values[name] = int(value) if name == "seed" else float(value)
            except ValueError:
                raise BadRequest("kv_faults", f"{name} must be a number, got {value!r}") from None
            high = {"seed": 2**63, "late_s": MAX_LATE_S}.get(name, 1.0)
            if not 0 <= values[name] <= high:
                raise BadRequest("kv_faults", f"{name} must be in [0, {high}], got {value}")
        return cls(**values)  # type: ignore[arg-type]


class FaultyTransport:
    """`inner` with `faults`; see `kv_transfer.transport.Transport` for what each call means.

    later: how to act after some time; None: the running event loop's `call_later`.
    """

    def __init__(self, inner: Transport, faults: TransportFaults, later: Later | None = None) -> None:
        self.inner = inner
        self._later = later
        self._on_notice: NoticeHandler = lambda _sender, _notice: None
        self._on_peer_lost: LostHandler = lambda _peer: None
        self._num_drops: Counter[WorkerRef] = Counter()
        self._late_pushes: set[asyncio.Task[None]] = set()
        self._closed = False
        self.inject(faults)

    def inject(self, faults: TransportFaults) -> None:
        """From now on these; the draws begin anew."""
        self._faults = faults
        self._random = random.Random(faults.seed)

    def describe(self) -> PoolDescription:
        return self.inner.describe()

    def stats(self) -> TransportStats:
        return self.inner.stats()

    def listen(self, on_notice: NoticeHandler, on_peer_lost: LostHandler) -> None:
        self._on_notice, self._on_peer_lost = on_notice, on_peer_lost
        self.inner.listen(self._arrived, on_peer_lost)

    async def connect(self, peer: PoolDescription) -> PeerConnected:
        return await self.inner.connect(peer)

    async def push(
        self, peer: WorkerRef, source_blocks: Sequence[int], target_blocks: Sequence[int], notice: bytes
    ) -> None:
        faults = self._faults
        if self._happens(faults.break_path):
            await self._break_path(peer)
        if self._happens(faults.fail_push):
            raise TransferFailed(f"injected: push to {peer} not posted")
        if source_blocks and self._happens(faults.corrupt_block):
            source_blocks = self._with_a_wrong_one(source_blocks)
        if not self._happens(faults.late_push):
            await self.inner.push(peer, source_blocks, target_blocks, notice)
            return
        late = asyncio.ensure_future(self._push_late(peer, source_blocks, target_blocks, notice))
        self._late_pushes.add(late)
        late.add_done_callback(self._late_pushes.discard)
        await asyncio.shield(late)  # cancelling the caller does not stop the bytes

    async def notify(self, peer: WorkerRef, notice: bytes) -> None:
        if self._happens(self._faults.break_path):
            await self._break_path(peer)
        await self.inner.notify(peer, notice)

    async def drop(self, peer: WorkerRef) -> None:
        self._num_drops[peer] += 1
        await self.inner.drop(peer)

    async def close(self) -> None:
        self._closed = True
        for task in self._late_pushes:
            task.cancel()
        await self.inner.close()

    def _arrived(self, sender: WorkerRef, notice: bytes) -> None:
        if self._happens(self._faults.lose_notice):
            return
        for _ in range(2 if self._happens(self._faults.double_notice) else 1):
            if self._happens(self._faults.late_notice):
                self._after(self._delay_s(), lambda: self._closed or self._on_notice(sender, notice))
            else:
                self._on_notice(sender, notice)

    async def _push_late(
        self, peer: WorkerRef, source_blocks: Sequence[int], target_blocks: Sequence[int], notice: bytes
    ) -> None:
        num_drops, due = self._num_drops[peer], asyncio.Event()
        self._after(self._delay_s(), due.set)
        await due.wait()
        if self._num_drops[peer] != num_drops:  # after a drop nothing of before it may be sent
            raise WorkerLost(peer.worker_id, f"{peer} was dropped")
        await self.inner.push(peer, source_blocks, target_blocks, notice)

    async def _break_path(self, peer: WorkerRef) -> None:
        with suppress(TransferFailed):
            await self.drop(peer)
        self._on_peer_lost(peer)
        raise WorkerLost(peer.worker_id, "injected: the path broke")

    def _with_a_wrong_one(self, blocks: Sequence[int]) -> list[int]:
        wrong = self._random.randrange(len(blocks))
        num_blocks = self.describe().pool.num_blocks
        return [(block + 1) % num_blocks if index == wrong else block for index, block in enumerate(blocks)]

    def _happens(self, chance: float) -> bool:
        return self._random.random() < chance

    def _delay_s(self) -> float:
        return self._random.uniform(0.0, self._faults.late_s)

    def _after(self, delay_s: float, what: Callable[[], object]) -> None:
        later = self._later or asyncio.get_running_loop().call_later
        later(delay_s, what)  # type: ignore[arg-type]
