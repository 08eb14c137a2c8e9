"""Which tokens of which sequences the next step computes: the one batch scheduler of both roles and the simulator.

1. `add` puts a request in the waiting queue; `add_landed` adds one whose prompt KV came from a peer.
2. `plan` fills a token budget: decodes first, then prefills under way, then waiting requests in order.
3. The driver computes the plan. Meanwhile requests may come and be cancelled.
4. `commit` takes the drawn tokens, makes full blocks findable, ends what ended, and says what progressed.

A step in flight owns its sequences: a request cancelled meanwhile gives its blocks back in `commit`, not before.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass

from core.errors import BadRequest, InvariantBroken
from core.identity import namespace
from core.membership import WorkerLoad
from core.request import FinishReason, GenerateRequest, TokenDelta, WorkUsage
from engine.block_pool import BlockPool
from engine.sequence import ModelLimits, Sequence, StopWatchFactory
from engine.step import Drawn, ScoredToken, StepPlan


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """token_budget: most tokens one step computes. max_sequences: most sequences in one step."""

    token_budget: int = 256
    max_sequences: int = 256

    def __post_init__(self) -> None:
        if self.token_budget < 1:
            raise BadRequest("token_budget", f"must be at least 1, got {self.token_budget}")
        if self.max_sequences < 1:
            raise BadRequest("max_sequences", f"must be at least 1, got {self.max_sequences}")


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step did for one sequence.

    num_computed: tokens whose KV is now in `block_table`. delta: the token drawn, if one was.
    handed_over: a prefill-only sequence ended; its references on `block_table` are now the receiver's to release.
    """

    request_id: str
    num_computed: int
    block_table: tuple[int, ...]
    delta: TokenDelta | None
    handed_over: bool = False


class Scheduler:
    """Owns the sequences of one worker and, through them, references on blocks of `pool`."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        limits: ModelLimits,
        identity_digest: bytes,
        make_watch: StopWatchFactory,
    ) -> None:
        self.config = config
        self.pool = pool
        self.limits = limits
        self._identity_digest = identity_digest
        self._make_watch = make_watch
        self._sequences: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: OrderedDict[str, Sequence] = OrderedDict()  # oldest first
        self._in_flight: StepPlan | None = None
        self.num_preemptions = 0

    def new_sequence(self, request: GenerateRequest, *, prefill_only: bool = False) -> Sequence:
        """A sequence of `request` that is not scheduled yet. Raises BadRequest when it can never fit."""
        most_tokens = request.num_prompt_tokens + (1 if prefill_only else request.stop.max_tokens)
        if request.num_prompt_tokens >= self.limits.max_context_tokens:
            raise BadRequest("prompt", f"{request.num_prompt_tokens} tokens leave no room in the context")
        capacity_tokens = self.pool.num_blocks * self.limits.block_size
        if min(most_tokens, self.limits.max_context_tokens) > capacity_tokens:
            raise BadRequest("max_tokens", f"{most_tokens} tokens never fit into a KV pool of {capacity_tokens}")
        return Sequence(
            request=request,
            limits=self.limits,
            namespace=namespace(self._identity_digest, request.tenant, request.cache_salt),
            prefill_only=prefill_only,
            watch=self._make_watch(request) if request.stop.stop_strings else None,
            tokens=list(request.prompt_token_ids),
        )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence to be computed from wherever its cached prefix ends."""
        self._register(sequence)
        self._waiting.append(sequence)

    def add_landed(self, sequence: Sequence, blocks: list[int], first_token: int) -> FinishReason | None:
        """Run a sequence whose prompt KV is in `blocks` (one reference each, now ours) and whose first token is out.

        Returns: why it already ended with that token; its blocks are then released, its full ones cached.
        """
        self._register(sequence)
        sequence.blocks = blocks
        sequence.num_computed = sequence.request.num_prompt_tokens
        self._cache_full_blocks(sequence)
        reason, _matched = sequence.append(first_token)
        if reason is not None:
            self._forget(sequence)
            return reason
        self._running[sequence.request_id] = sequence
        return None

    def cancel(self, request_id: str) -> bool:
        """Stop a request and free what it holds, at once or when the step in flight commits. False: not here."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if self._in_flight and any(item.request_id == request_id for item in self._in_flight.slices):
            sequence.cancelled = True
            return True
        self._forget(sequence)
        return True

    @property
    def owes_blocks(self) -> bool:
        """A sequence that already had tokens out was preempted, and waits for room: it goes before what is new."""
        return any(sequence.num_output > 0 for sequence in self._waiting)

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute. One step is in flight at a time."""
        if self._in_flight is not None:
            raise InvariantBroken("plan while a step is in flight")
        chosen: dict[str, int] = {}
        budget = self._plan_decodes(chosen, self.config.token_budget)
        budget = self._plan_prefills(chosen, budget)
        self._admit_waiting(chosen, budget)
        if not chosen:
            return None
        self._in_flight = StepPlan(tuple(self._running[name].slice(count) for name, count in chosen.items()))
        return self._in_flight

    def commit(self, plan: StepPlan, drawn: Collection[Drawn | None]) -> list[Progress]:
        """Take what was drawn for each slice of the step in flight, in order."""
        if plan is not self._in_flight or len(drawn) != len(plan.slices):
            raise InvariantBroken("commit of a step that is not in flight")
        self._in_flight = None
        progress = []
        for item, answer in zip(plan.slices, drawn, strict=True):
            sequence = self._sequences[item.request_id]
            if sequence.cancelled:
                self._forget(sequence)
                continue
            sequence.num_computed = item.end
            sequence.num_computed_prompt += max(0, min(item.end, sequence.request.num_prompt_tokens) - item.start)
            self._cache_full_blocks(sequence)
            progress.append(self._advance(sequence, answer))
        return progress

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            waiting_requests=len(self._waiting),
            running_requests=len(self._running),
            waiting_tokens=sum(item.num_uncomputed for item in self._sequences.values() if not item.decoding),
            free_blocks=self.pool.num_free,
            used_blocks=self.pool.num_used,
            quarantined_blocks=self.pool.num_quarantined,
        )

    def _register(self, sequence: Sequence) -> None:
        if sequence.request_id in self._sequences:
            raise InvariantBroken(f"request {sequence.request_id} is already scheduled")
        self._sequences[sequence.request_id] = sequence

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        if self._running.pop(sequence.request_id, None) is None and sequence in self._waiting:
            self._waiting.remove(sequence)
        self.pool.release(sequence.drop_blocks())

    def _plan_decodes(self, chosen: dict[str, int], budget: int) -> int:
        """One token for each decoding sequence, oldest first; the youngest are preempted when blocks run out."""
        for sequence in [item for item in self._running.values() if item.decoding]:
            if budget == 0 or len(chosen) == self.config.max_sequences:
                break
            if sequence.request_id in self._running and self._grow(sequence, chosen):
                chosen[sequence.request_id] = 1
                budget -= 1
        return budget

    def _plan_prefills(self, chosen: dict[str, int], budget: int) -> int:
        for sequence in [item for item in self._running.values() if not item.decoding]:
            if budget == 0 or len(chosen) == self.config.max_sequences:
                break
            chosen[sequence.request_id] = min(budget, sequence.num_uncomputed)
            budget -= chosen[sequence.request_id]
        return budget

    def _admit_waiting(self, chosen: dict[str, int], budget: int) -> None:
        """Start waiting sequences in order; the first that finds no room stops the scan, so that none is overtaken."""
        while self._waiting and budget > 0 and len(chosen) < self.config.max_sequences:
            sequence = self._waiting[0]
            taken = self.pool.acquire(sequence.reusable_hashes(), sequence.num_blocks_to(sequence.num_known))
            if taken is None:
                return
            hits, fresh = taken
            self._waiting.popleft()
            sequence.blocks = hits + fresh
            sequence.num_computed = len(hits) * self.limits.block_size
            if sequence.num_output == 0:
                sequence.num_cached_prompt = sequence.num_computed
            self._running[sequence.request_id] = sequence
            chosen[sequence.request_id] = min(budget, sequence.num_uncomputed)
            budget -= chosen[sequence.request_id]

    def _grow(self, sequence: Sequence, chosen: dict[str, int]) -> bool:
        """Make room for one more token, preempting from the youngest. False: this one was preempted itself."""
        while sequence.num_blocks_to(sequence.num_known) > len(sequence.blocks):
            fresh = self.pool.allocate(1)
            if fresh is not None:
                sequence.blocks += fresh
                continue
            victim = next(reversed(self._running.values()))
            self._preempt(victim)
            chosen.pop(victim.request_id, None)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it waits, first in line, to compute again what is no longer cached."""
        del self._running[sequence.request_id]
        self.pool.release(sequence.drop_blocks())
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _cache_full_blocks(self, sequence: Sequence) -> None:
        sequence.extend_hashes(sequence.num_computed)
        num_full = sequence.num_computed // self.limits.block_size
        for index in range(sequence.num_cached_blocks, num_full):
            self.pool.cache(sequence.blocks[index], sequence.hashes[index])
        sequence.num_cached_blocks = num_full

    def _advance(self, sequence: Sequence, drawn: Drawn | None) -> Progress:
        table, computed = tuple(sequence.blocks), sequence.num_computed
        if drawn is None:
            return Progress(sequence.request_id, computed, table, delta=None)
        token_id, logprobs = (drawn.token_id, (drawn.logprobs,)) if isinstance(drawn, ScoredToken) else (drawn, ())
        reason, matched = sequence.append(token_id)
        delta = TokenDelta(
            request_id=sequence.request_id,
            position=sequence.num_output - 1,
            token_ids=(token_id,),
            finish_reason=reason,
            matched_stop=matched,
            usage=self._first_usage(sequence),
            logprobs=logprobs,
        )
        if sequence.prefill_only:
            sequence.drop_blocks()
        if reason is not None or sequence.prefill_only:
            self._forget(sequence)
        return Progress(sequence.request_id, computed, table, delta, handed_over=sequence.prefill_only)

    def _first_usage(self, sequence: Sequence) -> WorkUsage | None:
        if sequence.usage_sent:
            return None
        sequence.usage_sent = True
        return WorkUsage(cached_tokens=sequence.num_cached_prompt, computed_tokens=sequence.num_computed_prompt)
