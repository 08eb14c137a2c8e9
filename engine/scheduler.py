"""Which tokens of which sequences the next step computes: the one batch scheduler of both roles.

1. `add` puts a request in the waiting line. One whose prompt KV comes from a peer waits for its blocks in a line of
   its own (`await_room`, `reserve_next`) and runs when they are filled (`add_landed`).
2. `plan` fills a token budget: decodes first, then prefills under way, then waiting requests in order; what is left
   goes to batch work in the same way (engine/waiting_line.py says what that is).
3. The driver computes the plan. Meanwhile requests may come and be cancelled.
4. `commit` takes the drawn tokens, makes full blocks findable, ends what ended, and says what progressed.

A request with n choices is one sequence until its prompt is computed, and then forks into n, each with references on
the prompt's blocks (engine/growth.py: copy-on-write). Choices are preempted one by one, and cancelled together.

A step in flight owns its sequences and the sources of its copies: a request cancelled meanwhile gives its blocks back
in `commit`, not before. Blocks go to whoever is first in line, and of those who hold some the last in line is preempted
first. A newcomer leaves room for the next blocks of those who run, and for whoever waits before it in the other line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain

from core.errors import InvariantBroken
from core.identity import Adapter
from core.membership import WorkerLoad
from core.request import GenerateRequest
from engine.block_pool import BlockPool
from engine.copy_wait import CopyWait
from engine.deltas import add_drawn
from engine.growth import BlockGrowth
from engine.scheduler_config import SchedulerConfig
from engine.sequence import MatcherFactory, ModelLimits, Sequence, StopWatchFactory, no_grammars
from engine.sequence_maker import SequenceMaker
from engine.step import NOT_FINITE, Answer, Progress, StepPlan
from engine.step_pace import StepPace
from engine.waiting_line import WaitingLine, rank


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks for the prompt of `sequence`, one reference each: prefix hits, and fresh ones to be filled by a peer."""

    sequence: Sequence
    hits: list[int]
    fresh: list[int]


class Scheduler:
    """Owns the sequences of one worker and, through them, references on blocks of `pool`."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        limits: ModelLimits,
        identity_digest: bytes,
        make_watch: StopWatchFactory,
        make_matcher: MatcherFactory = no_grammars,
        adapters: Collection[Adapter] = (),
    ) -> None:
        self.config = config
        self.pool = pool
        self.limits = limits
        capacity_tokens = pool.num_blocks * limits.block_size
        self._maker = SequenceMaker(
            limits, capacity_tokens, config.ageing_steps, identity_digest, make_watch, make_matcher, adapters
        )
        self._make_watch = make_watch
        self._sequences: dict[str, list[Sequence]] = {}  # by request id: its choices
        self._waiting = WaitingLine(config.scan_depth, config.max_overtakes)
        self._awaiting_room = WaitingLine(config.scan_depth, config.max_overtakes)
        self._reserved: dict[str, Sequence] = {}  # their blocks are whoever reserved them's, until they land
        self._running: dict[Sequence, None] = {}
        self._growth = BlockGrowth(pool, config.growth_blocks)
        self._copy_wait = CopyWait(pool)
        self._pace = StepPace(config.max_decode_slowdown)
        self._in_flight: StepPlan | None = None
        self._computing: tuple[Sequence, ...] = ()  # of the step in flight, one for each slice
        self.num_steps = 0
        self.num_preemptions = 0

    def new_sequence(self, request: GenerateRequest, *, prefill_only: bool = False) -> Sequence:
        """A sequence of `request`, from now on ageing but not scheduled. Raises: as SequenceMaker.make."""
        return self._maker.make(request, self.num_steps, prefill_only=prefill_only)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence to be computed from wherever its cached prefix ends."""
        self._register(sequence)
        self._waiting.push(sequence)

    def await_room(self, sequence: Sequence) -> None:
        """Queue a sequence whose prompt KV will come from a peer, until `reserve_next` has blocks for it."""
        sequence.scoring = False  # so will the scores
        self._awaiting_room.push(sequence)

    def reserve_next(self) -> Reservation | None:
        """Blocks for the prompt of the next one that awaits room; None when there is none for anybody."""
        for due in (True, False):
            taken = self._admit(self._awaiting_room, due, behind=self._waiting)
            if taken is not None:
                self._reserved[taken.sequence.request_id] = taken.sequence
                return taken
        return None

    def end_reservation(self, sequence: Sequence) -> None:
        """It awaits no room or KV any more; reserved blocks stay the caller's."""
        self._awaiting_room.remove(sequence)
        self._reserved.pop(sequence.request_id, None)

    def add_landed(
        self, sequence: Sequence, blocks: list[int], first_tokens: Collection[int], num_intact: int | None = None
    ) -> bool:
        """Run a sequence whose prompt KV is in `blocks` (one reference each, now ours) and whose choices' first tokens
        are out.

        num_intact: leading blocks that arrived whole, None for all; the rest is computed again, as after a preemption.
        Returns: whether any choice goes on. One that its first token ends is released, its full blocks cached.
        """
        self.end_reservation(sequence)
        self._register(sequence)
        self._running[sequence] = None
        sequence.blocks = blocks
        num_intact = len(blocks) if num_intact is None else num_intact
        sequence.num_computed = min(sequence.num_known, num_intact * self.limits.block_size)
        self._cache_full_blocks(sequence)
        alive = []
        for choice, first_token in zip(self._fork(sequence), first_tokens, strict=True):
            reason, _matched = choice.append(first_token)
            if reason is not None:
                self._forget(choice)
                continue
            alive.append(choice)
            if num_intact < len(blocks):
                self._preempt(choice)
        if alive:
            alive[0].usage_sent = False
        return bool(alive)

    def cancel(self, request_id: str) -> bool:
        """Stop a request and free what it holds, at once or when the step in flight commits. False: not here."""
        choices = self._sequences.get(request_id)
        if choices is None:
            return False
        for sequence in list(choices):
            if sequence in self._computing:
                sequence.cancelled = True
            else:
                self._forget(sequence)
        return True

    def holds(self, request_id: str) -> bool:
        """It waits to be computed, or runs."""
        return request_id in self._sequences

    def unbegun(self) -> list[str]:
        """Requests that wait and of which nothing was computed here, in order."""
        return [
            item.request_id
            for item in self._waiting
            if not item.num_computed_prompt and item.num_known == item.request.num_given_tokens
        ]

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute. One step is in flight at a time."""
        if self._in_flight is not None:
            raise InvariantBroken("plan while a step is in flight")
        self.pool.tiers.allow_copies(bounded=True)
        chosen: dict[Sequence, int] = {}
        budget = self.config.token_budget
        num_decodes = sum(sequence.decoding for sequence in self._running)
        room = self._pace.prompt_tokens_beside(min(num_decodes, budget, self.config.max_sequences))
        for due in (True, False):
            group = [item for item in sorted(self._running, key=rank) if item.is_due(self.num_steps) is due]
            budget = self._plan_decodes(group, chosen, budget)
            share = min(budget, room)
            used = share - self._admit_waiting(due, chosen, self._plan_prefills(group, chosen, share))
            budget, room = budget - used, room - used
        if not chosen:
            return None
        slices = tuple(sequence.slice(num_tokens) for sequence, num_tokens in chosen.items())
        self._in_flight, self._computing = StepPlan(slices, self._growth.take_copies()), tuple(chosen)
        self._age(chosen)
        return self._in_flight

    def commit(self, plan: StepPlan, drawn: Collection[tuple[Answer, ...]], duration_s: float = 0.0) -> list[Progress]:
        """Take what was drawn for the samples of each slice of the step in flight, in order, and how long it took."""
        if plan is not self._in_flight or len(drawn) != len(plan.slices):
            raise InvariantBroken("commit of a step that is not in flight")
        computing, self._computing, self._in_flight = self._computing, (), None
        self._pace.learn(duration_s, plan.num_tokens - plan.num_decodes, plan.num_decodes)
        self.pool.release([source for source, _target in plan.copies])
        progress = []
        for sequence, item, answer in zip(computing, plan.slices, drawn, strict=True):
            if sequence.cancelled:
                self._forget(sequence)
                continue
            if NOT_FINITE in answer:
                progress.append(self._fail(sequence))
                continue
            sequence.num_computed = item.end
            sequence.num_computed_prompt += max(0, min(item.end, sequence.request.num_given_tokens) - item.start)
            self._cache_full_blocks(sequence)
            progress.append(self._advance(sequence, answer))
        return progress

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            waiting_requests=len(self._waiting),
            running_requests=len(self._running),
            waiting_tokens=sum(
                item.num_uncomputed for item in chain.from_iterable(self._sequences.values()) if not item.decoding
            ),
            free_blocks=self.pool.num_free,
            used_blocks=self.pool.num_used,
            quarantined_blocks=self.pool.num_quarantined,
        )

    def _register(self, sequence: Sequence) -> None:
        if sequence.request_id in self._sequences:
            raise InvariantBroken(f"request {sequence.request_id} is already scheduled")
        self._sequences[sequence.request_id] = [sequence]

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """The choices of a running sequence, all running; they share its blocks."""
        choices = sequence.fork(self._make_watch)
        for choice in choices[1:]:
            self.pool.hold(choice.blocks)
            self._running[choice] = None
            self._sequences[sequence.request_id].append(choice)
        return choices

    def _forget(self, sequence: Sequence) -> None:
        choices = self._sequences[sequence.request_id]
        choices.remove(sequence)
        if not choices:
            del self._sequences[sequence.request_id]
        if sequence in self._running:
            del self._running[sequence]
        else:
            self._waiting.remove(sequence)
        self.pool.release(sequence.drop_blocks())

    def _age(self, chosen: Iterable[Sequence]) -> None:
        """One step more has passed; batch work that it serves comes no nearer to being due."""
        for sequence in chosen:
            if not sequence.is_due(self.num_steps):
                sequence.due_step += 1
        self.num_steps += 1

    def _plan_decodes(self, group: list[Sequence], chosen: dict[Sequence, int], budget: int) -> int:
        """One token for each decoding sequence, first in line first; the last are preempted when blocks run out."""
        for sequence in group:
            if budget == 0 or len(chosen) == self.config.max_sequences:
                break
            if sequence.decoding and sequence in self._running and self._grow(sequence):
                chosen[sequence] = 1
                budget -= 1
        return budget

    def _plan_prefills(self, group: list[Sequence], chosen: dict[Sequence, int], budget: int) -> int:
        for sequence in group:
            if budget == 0 or len(chosen) == self.config.max_sequences:
                break
            if not sequence.decoding and sequence in self._running:
                budget -= self._choose(sequence, chosen, budget)
        return budget

    def _choose(self, sequence: Sequence, chosen: dict[Sequence, int], budget: int) -> int:
        """Give a prompt its share of the step; returns how many tokens. Scores need a row of logits each, so that of
        such prompts a step computes little."""
        num_tokens = min(budget, sequence.num_uncomputed)
        if sequence.num_unscored:
            scored = sum(count for other, count in chosen.items() if other.num_unscored)
            num_tokens = min(num_tokens, self.config.max_scored_tokens - scored)
        if num_tokens:
            chosen[sequence] = num_tokens
        return num_tokens

    def _admit_waiting(self, due: bool, chosen: dict[Sequence, int], budget: int) -> int:
        only_decodes = bool(chosen) and all(sequence.decoding for sequence in chosen)  # else prompts have a step anyway
        if only_decodes and self._waiting.may_gather(self.num_steps, self.config.prefill_delay_steps, budget):
            return budget
        while budget > 0 and len(chosen) < self.config.max_sequences:
            taken = self._admit(self._waiting, due, behind=self._awaiting_room)
            if taken is None:
                break
            sequence = taken.sequence
            sequence.blocks = taken.hits + taken.fresh
            sequence.num_computed = len(taken.hits) * self.limits.block_size
            if sequence.num_known == sequence.request.num_given_tokens:
                sequence.num_cached_prompt = sequence.num_computed
            self._running[sequence] = None
            budget -= self._choose(sequence, chosen, budget)
        return budget

    def _admit(self, line: WaitingLine, due: bool, behind: WaitingLine) -> Reservation | None:
        """Blocks for the known tokens of the next one in `line`, beside what goes before it in the line `behind`."""
        found: list[Reservation] = []
        holders = [*self._running, *self._reserved.values()] if line else []
        growth = self._growth.num_expected(item for item in holders if not due or item.is_due(self.num_steps))

        def take(sequence: Sequence) -> bool:
            hashes, num_blocks = sequence.reusable_hashes(), sequence.num_blocks_to(sequence.num_known)
            if sequence.fetch is None:  # once: what leaves the host again meanwhile is computed
                sequence.fetch = self.pool.fetch(hashes)
            if not self.pool.is_fetched(sequence.fetch):
                return False
            owed = sum(item.num_blocks_to(item.num_known) for item in behind.before(sequence))
            fork = min(sequence.num_fork_blocks, self.pool.num_blocks - num_blocks)  # what the pool cannot have anyway
            keep_free = owed + growth + fork
            if self._copy_wait.waits(sequence, hashes, num_blocks, keep_free, self.num_steps):
                return False
            while (taken := self.pool.acquire(hashes, num_blocks, keep_free)) is None:
                if not (due and self._preempt_batch(num_blocks + keep_free)):
                    return False
            found.append(Reservation(sequence, *taken))
            return True

        if not self._running:
            self.pool.tiers.allow_copies(bounded=False)
        line.admit(self.num_steps, due=due, take=take)
        if not self._running:
            self.pool.tiers.allow_copies(bounded=True)
        return found[0] if found else None

    def _preempt_batch(self, num_blocks: int) -> bool:
        """Preempt the last of batch work, to get `num_blocks` free in the end. False: all of it would not be enough.

        What is only prefilled here is spared: its blocks are on their way to another worker.
        """
        if self._in_flight is not None:
            return False
        batch = [item for item in self._running if not item.is_due(self.num_steps) and not item.prefill_only]
        held = Counter(chain.from_iterable(item.blocks for item in batch))
        num_theirs = sum(self.pool.num_references(block) == count for block, count in held.items())
        if not batch or self.pool.num_free + num_theirs < num_blocks:
            return False
        self._preempt(max(batch, key=rank))
        return True

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for one more token, preempting from the last in line. False: this one was preempted itself."""
        while self._growth.needs_block(sequence):
            fresh = self.pool.allocate(1)
            if fresh is not None:
                self._growth.give(sequence, *fresh)
                continue
            victim = max(self._running, key=rank)  # not chosen yet: the chosen rank before us
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it waits, in its old place in line, to compute again what is no longer cached."""
        del self._running[sequence]
        self.pool.release(sequence.drop_blocks())
        self._waiting.push(sequence)
        self.num_preemptions += 1

    def _cache_full_blocks(self, sequence: Sequence) -> None:
        sequence.extend_hashes(sequence.num_computed)
        num_full = sequence.num_computed // self.limits.block_size
        for index in range(sequence.num_cached_blocks, num_full):
            self.pool.cache(sequence.blocks[index], sequence.hashes[index])
        sequence.num_cached_blocks = num_full

    def _fail(self, sequence: Sequence) -> Progress:
        """End a sequence that comes to no numbers. What led there is not to be found again, hits included."""
        self.pool.forget(sequence.blocks)
        delta, computed = add_drawn(sequence, NOT_FINITE), sequence.num_computed
        self._forget(sequence)
        return Progress(sequence.request_id, computed, (), (delta,), sequence.request_id not in self._sequences)

    def _advance(self, sequence: Sequence, answer: tuple[Answer, ...]) -> Progress:
        request_id, table, computed = sequence.request_id, tuple(sequence.blocks), sequence.num_computed
        drawn_here = sequence.take_scores(answer)
        if sequence.num_uncomputed:  # then it is what PROBE drew
            return Progress(request_id, computed, table, deltas=())
        handed_over = sequence.prefill_only
        choices = sequence.fork(self._make_watch) if handed_over else self._fork(sequence)
        deltas = tuple(add_drawn(choice, drawn) for choice, drawn in zip(choices, drawn_here, strict=True))
        if handed_over:
            sequence.drop_blocks()
            self._forget(sequence)
        else:
            for choice, delta in zip(choices, deltas, strict=True):
                if delta.finish_reason is not None:
                    self._forget(choice)
        return Progress(request_id, computed, table, deltas, request_id not in self._sequences, handed_over)
