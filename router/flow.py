"""What a router knows of one open request: how far each of its outputs is, and who computes on it.

A leg is one line of work with workers of its own. A request begins as one leg for all its choices, and stays one while
it can begin again. When its workers are lost after tokens are out, each choice goes on in a leg of its own, from its
latest token on. A leg that waits long for its first token may get a rival on other workers: the first token of either
ends the other. A leg's stages:
1. QUEUED: its turn has not come (router/admission/), or no fitting workers are ready; for a bounded time.
2. RESERVING: the decode worker was asked for blocks. 3. PREFILLING: the prefill worker has the ticket.
4. DECODING: the first token is out (or the decode worker does both), the rest streams.
5. DONE: finished, failed, cancelled or continued by others; every worker that held something was told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from core.errors import InvariantBroken
from core.membership import WorkerRef
from core.request import GenerateRequest, Placement, TokenDelta
from router.policy.choose import Plan
from router.policy.transfer import HandoffWatch


class Stage(StrEnum):
    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    DONE = "done"


MAX_FAILED_HANDOFFS: Final = 2
MAX_PARDONS: Final = 48  # so that two requests that kill workers in turn do not excuse each other for ever
NEXT_STAGES: Final[dict[Stage, frozenset[Stage]]] = {
    Stage.QUEUED: frozenset({Stage.RESERVING, Stage.DECODING, Stage.DONE}),
    Stage.RESERVING: frozenset({Stage.PREFILLING, Stage.QUEUED, Stage.DONE}),
    Stage.PREFILLING: frozenset({Stage.DECODING, Stage.QUEUED, Stage.DONE}),
    Stage.DECODING: frozenset({Stage.QUEUED, Stage.DONE}),
    Stage.DONE: frozenset(),
}


@dataclass(slots=True)
class Output:
    """One choice: the tokens that are out, and those that came before the ones they follow."""

    tokens: list[int] = field(default_factory=list)
    early: dict[int, TokenDelta] = field(default_factory=dict)
    ended: bool = False

    def take(self, delta: TokenDelta) -> list[TokenDelta]:
        """The deltas that are next, now that `delta` is here; nothing after the end, and no position twice."""
        self.early.setdefault(delta.position, delta)
        ready = []
        while not self.ended and (item := self.early.pop(len(self.tokens), None)) is not None:
            self.tokens += item.token_ids
            self.ended = item.finish_reason is not None
            ready.append(item)
        return ready


@dataclass(slots=True, eq=False)
class Flow:
    """An open request. `keys`: of its prompt's blocks (router/policy/choose.py). num_failures: of attempts, that it may
    be the reason of; num_silent_failures: of these, since a token came. The counts are over all its legs."""

    request: GenerateRequest
    placement: Placement
    keys: Sequence[int]
    arrived_s: float
    deadline_s: float
    outputs: list[Output]
    legs: list[Leg] = field(default_factory=list)
    num_plans: int = 0
    num_failures: float = 0.0
    num_silent_failures: float = 0.0
    num_pardons: int = 0
    num_failed_handoffs: int = 0

    @property
    def next_placement(self) -> Placement:
        """A prompt that its caller leaves to us is computed where it is decoded, once hand-offs of it have failed."""
        tired = self.placement is Placement.AUTO and self.num_failed_handoffs >= MAX_FAILED_HANDOFFS
        return Placement.LOCAL if tired else self.placement

    def blame(self, has_talked: bool, share: float = 1.0) -> None:
        """An attempt failed while it was computed. has_talked: it gave a token. share: of the blame."""
        self.num_failures += share
        self.num_silent_failures = 0.0 if has_talked else self.num_silent_failures + share

    def pardon(self) -> None:
        """A worker died without it: then workers die of something else too. One that kills is at every death."""
        if self.num_failures and self.num_pardons < MAX_PARDONS:
            self.num_pardons += 1
            self.num_failures = max(0.0, self.num_failures - 1.0)
            self.num_silent_failures = max(0.0, self.num_silent_failures - 1.0)


@dataclass(slots=True, eq=False)
class Leg:
    """`request` is what workers get, under the id of the current attempt; its choice i is `choices[i]` of the flow.

    prefill_open: whoever computes the first token has not sent it. placed: the decode worker has said that it has KV
    blocks for the prompt. in_line: whoever computes it has said that it waits there, or is computed.
    rival: a later or earlier attempt at the same, until either has a token.
    watch: of its hand-off, until the decode worker's second token, where it is of one choice.
    """

    flow: Flow
    request: GenerateRequest
    choices: tuple[int, ...]
    queue_deadline_s: float
    stage: Stage = Stage.QUEUED
    plan: Plan | None = None
    prefill_open: bool = False
    placed: bool = False
    in_line: bool = False
    begun_s: float = 0.0
    prefill_begun_s: float = 0.0
    rival: Leg | None = None
    watch: HandoffWatch | None = None

    def move(self, to: Stage) -> None:
        if to not in NEXT_STAGES[self.stage]:
            raise InvariantBroken(f"request {self.request.request_id}: {self.stage} -> {to} is not in the table")
        self.stage = to

    @property
    def computed_tokens(self) -> int:
        """What the plan expects to be computed of the prompt."""
        return 0 if self.plan is None else self.plan.scores[0].computed_tokens

    @property
    def outputs(self) -> list[Output]:
        return [self.flow.outputs[choice] for choice in self.choices]

    @property
    def has_new_tokens(self) -> bool:
        """Beginning again would compute what the client has already."""
        return any(len(output.tokens) > len(self.request.output_token_ids) for output in self.outputs)

    def uses(self, worker: WorkerRef) -> bool:
        """Its loss ends the attempt."""
        return self.plan is not None and (
            self.plan.decode == worker or (self.plan.prefill == worker and self.prefill_open)
        )

    def is_computed_on(self, worker: WorkerRef) -> bool:
        """It may be what ended that worker; one that only held blocks for it died of something else."""
        if self.plan is None or self.stage not in (Stage.PREFILLING, Stage.DECODING):
            return False
        return worker == (self.plan.prefiller if self.prefill_open else self.plan.decode)

    def continued(self, queue_deadline_s: float) -> list[Leg]:
        """A leg for each choice that has not ended, from its latest token on."""
        return [
            Leg(self.flow, self._rest_of(index), (choice,), queue_deadline_s)
            for index, choice in enumerate(self.choices)
            if not self.flow.outputs[choice].ended
        ]

    def _rest_of(self, index: int) -> GenerateRequest:
        return replace(
            self.request,
            num_choices=1,
            sampling=self.request.sampling.for_choice(index),
            output_token_ids=tuple(self.flow.outputs[self.choices[index]].tokens),
        )
