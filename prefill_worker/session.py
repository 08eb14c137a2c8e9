"""What a prefill worker does for each request, without clock or socket.

1. LOOKING: is a longer prefix cached on another worker? One bounded question to the shared index.
2. FETCHING: the holder pushes those blocks here; they enter this worker's prefix cache as they land.
3. COMPUTING: the scheduler computes what no cache had, in chunks; each finished run of blocks is pushed to the
   decode worker while the next chunk computes. The last push carries each choice's first token.
A prefix that does not come in time is computed: a hit saves work, a miss costs a bounded wait.

Mirror image: decode_worker/session.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from core.blocks import MIN_FETCHED_BLOCKS, num_blocks_for
from core.errors import BadRequest
from core.handoff import HandoffNotice, HandoffTicket, PushPrefix
from core.identity import BlockHash
from core.membership import WorkerRef
from core.messages import Refused, RefuseReason
from core.request import GenerateRequest, TokenDelta, WorkUsage
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step import Progress
from kv_transfer.effects import Effect as KvEffect
from kv_transfer.effects import Notify, SourceEnded, TargetFailed, TargetLanded
from kv_transfer.session import HandoffSessions


@dataclass(frozen=True, slots=True)
class LookUpPrefix:
    """Ask the shared index who holds the longest leading run; answer with `PrefillSession.prefix_found`."""

    request_id: str
    block_hashes: tuple[BlockHash, ...]


Effect = KvEffect | Refused | LookUpPrefix


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """min_fetch_blocks: fewer missing blocks than this are computed, not fetched.
    fetch_timeout_s: how long a request waits for a holder's push. block_bytes: of one KV block."""

    block_bytes: int
    min_fetch_blocks: int = MIN_FETCHED_BLOCKS
    fetch_timeout_s: float = 2.0


@dataclass(slots=True)
class _Prefill:
    sequence: Sequence
    handoff_id: str
    hits: list[int]  # local hits on the device, held while a fetch extends them
    num_cached: int = 0  # leading blocks that any tier had here when it came
    queued: bool = False  # the scheduler has it
    fetch_deadline_s: float = 0.0
    fetched_blocks: int = 0

    @property
    def fetch_id(self) -> str:
        return f"{self.handoff_id}/prefix"


class PrefillSession:
    """All requests of one prefill worker."""

    def __init__(self, config: PrefillConfig, scheduler: Scheduler, handoffs: HandoffSessions) -> None:
        self._config = config
        self._scheduler = scheduler
        self._handoffs = handoffs
        self._prefills: dict[str, _Prefill] = {}  # by request id
        self._request_of: dict[str, str] = {}  # handoff id and, while fetching, fetch id -> request id

    def __len__(self) -> int:
        """Requests whose prefix is looked for; queued ones are the scheduler's, computed ones hand-offs."""
        return sum(not prefill.queued for prefill in self._prefills.values())

    def unbegun(self) -> list[str]:
        """Requests of which nothing is computed: a prefix is looked for, or the scheduler has others to do first."""
        waiting = set(self._scheduler.unbegun())
        return [name for name, prefill in self._prefills.items() if not prefill.queued or name in waiting]

    def start(self, request: GenerateRequest, ticket: HandoffTicket, now: float) -> list[Effect]:
        """Accept a ticket and compute the prompt, or refuse and tell the target at once."""
        effects: list[Effect] = list(self._handoffs.source.open(ticket, now))
        if not self._handoffs.source.is_open(ticket.handoff_id):
            return [*effects, Refused(request.request_id, RefuseReason.TRANSFER_FAILED, "stopped by the target")]
        try:
            sequence = self._scheduler.new_sequence(request, prefill_only=True)
        except BadRequest as error:
            effects += self._handoffs.source.cancel(ticket.handoff_id)
            return [*effects, Refused(request.request_id, RefuseReason.BAD_REQUEST, str(error))]
        prefill = _Prefill(sequence, ticket.handoff_id, hits=[])
        self._prefills[request.request_id] = prefill
        self._request_of[ticket.handoff_id] = request.request_id
        hashes = sequence.reusable_hashes()
        pool = self._scheduler.pool
        prefill.num_cached = pool.num_cached(hashes)
        if len(hashes) - prefill.num_cached >= self._config.min_fetch_blocks:
            prefill.hits = pool.match(hashes)
            pool.hold(prefill.hits)
            return [*effects, LookUpPrefix(request.request_id, tuple(hashes))]
        self._compute(prefill)
        return effects

    def prefix_found(self, request_id: str, num_blocks: int, holder: WorkerRef | None, now: float) -> list[Effect]:
        """The index's answer: `holder` has the first `num_blocks` blocks of the prompt, or nobody has more than we."""
        prefill = self._prefills.get(request_id)
        if prefill is None:
            return []
        pages = None
        if holder is not None and num_blocks - prefill.num_cached >= self._config.min_fetch_blocks:
            pages = self._scheduler.pool.allocate(num_blocks - len(prefill.hits))
        if holder is None or pages is None:
            self._compute(prefill)
            return []
        prefill.fetch_deadline_s = now + self._config.fetch_timeout_s
        self._request_of[prefill.fetch_id] = request_id
        target = self._handoffs.target
        ticket = target.reserve(prefill.fetch_id, holder, 0, tuple(pages), now, may_be_short=True)
        wanted = prefill.sequence.reusable_hashes()[len(prefill.hits) : num_blocks]
        ask = PushPrefix(tuple(wanted), ticket.block_ids)
        return [Notify(holder, HandoffNotice(ticket.handoff_id, ticket.generation, ask))]

    def landed(self, outcome: TargetLanded) -> list[Effect]:
        """A fetched prefix is here and verified: findable like any other, then computed on."""
        prefill = self._prefills[self._request_of.pop(outcome.handoff_id)]
        hashes = prefill.sequence.reusable_hashes()[len(prefill.hits) :]
        for block, block_hash in zip(outcome.blocks, hashes, strict=False):
            self._scheduler.pool.cache(block, block_hash)
        prefill.hits += outcome.blocks
        prefill.fetched_blocks = len(outcome.blocks)
        self._compute(prefill)
        return []

    def failed(self, outcome: TargetFailed) -> list[Effect]:
        """A prefix will not come: compute it."""
        request_id = self._request_of.pop(outcome.handoff_id, None)
        if request_id is not None and request_id in self._prefills:
            self._compute(self._prefills[request_id])
        return []

    def progressed(self, progress: list[Progress], now: float) -> tuple[list[TokenDelta], list[Effect]]:
        """One step's chunks and first tokens: push what is finished, hand the first tokens out."""
        deltas: list[TokenDelta] = []
        effects: list[Effect] = []
        for item in progress:
            prefill = self._prefills[item.request_id]
            effects += self._push(prefill.handoff_id, item, now)
            if item.ended:
                deltas += [self._with_usage(prefill, delta) for delta in item.deltas]
                self._forget(item.request_id)
            if item.handed_over:
                self._scheduler.pool.release(item.block_table)
        return deltas, effects

    def source_ended(self, outcome: SourceEnded, now: float) -> list[Effect]:
        """The target stopped or died: computing on would serve nobody."""
        request_id = self._request_of.get(outcome.handoff_id)
        return self._drop(request_id, now) if request_id is not None else []

    def cancel(self, request_id: str, now: float) -> list[Effect]:
        """Free what the request holds, in whatever state it is; its target hears Quiet."""
        prefill = self._prefills.get(request_id)
        if prefill is None:
            return []
        return [*self._drop(request_id, now), *self._handoffs.source.cancel(prefill.handoff_id)]

    def tick(self, now: float) -> list[Effect]:
        """Give up on prefixes that do not come in time."""
        effects: list[Effect] = []
        for prefill in list(self._prefills.values()):
            if prefill.fetch_id in self._request_of and now >= prefill.fetch_deadline_s:
                effects += self._handoffs.target.cancel(prefill.fetch_id, "prefix came too late", now)
        return effects

    def _compute(self, prefill: _Prefill) -> None:
        """Queue the sequence; the hits it is admitted with are the most recent in the cache."""
        self._scheduler.add(prefill.sequence)
        prefill.queued = True
        self._scheduler.pool.release(prefill.hits)
        prefill.hits = []

    def _push(self, handoff_id: str, item: Progress, now: float) -> list[KvEffect]:
        source = self._handoffs.source
        if not source.is_open(handoff_id):
            return []
        block_size = self._scheduler.limits.block_size
        if not item.ended:
            num_full = item.num_computed // block_size
            return source.blocks_ready(handoff_id, item.block_table, num_full, now, last=False)
        if not all(delta.token_ids for delta in item.deltas):
            return []  # a dead end: the router calls decode's share back, which stops this hand-off
        num_blocks = num_blocks_for(item.num_computed, block_size)
        first_tokens = tuple(delta.token_ids[0] for delta in item.deltas)
        return source.blocks_ready(handoff_id, item.block_table, num_blocks, now, last=True, first_tokens=first_tokens)

    def _with_usage(self, prefill: _Prefill, delta: TokenDelta) -> TokenDelta:
        """Tell fetched prompt tokens from those that were in the local cache before."""
        if not prefill.fetched_blocks or delta.usage is None:
            return delta
        fetched = min(prefill.fetched_blocks * self._scheduler.limits.block_size, delta.usage.cached_tokens)
        usage: WorkUsage = replace(
            delta.usage,
            cached_tokens=delta.usage.cached_tokens - fetched,
            fetched_tokens=fetched,
            kv_blocks_received=prefill.fetched_blocks,
            kv_bytes_received=prefill.fetched_blocks * self._config.block_bytes,
        )
        return replace(delta, usage=usage)

    def _drop(self, request_id: str, now: float) -> list[Effect]:
        """Forget a request that is not done: out of the scheduler, out of a fetch, hits released."""
        prefill = self._prefills[request_id]
        self._forget(request_id)
        self._scheduler.cancel(request_id)
        self._scheduler.pool.release(prefill.hits)
        return list(self._handoffs.target.cancel(prefill.fetch_id, "cancelled", now))

    def _forget(self, request_id: str) -> None:
        prefill = self._prefills.pop(request_id)
        self._request_of.pop(prefill.handoff_id, None)
        self._request_of.pop(prefill.fetch_id, None)
