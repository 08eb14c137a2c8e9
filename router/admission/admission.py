"""Between submit and plan: who may wait, who is next, and who is told to come back later.

1. `enter`: a request gets its place in the line, or is refused: the line is full, or its first token would come late.
2. `next`: as long as the workers have room, the next one's turn; it leaves the line.
3. `begin`, `end`: a prompt goes to the workers; its first token is here, or it will not come.
4. `leave`: the request is over, wherever it was.
A request that goes on elsewhere passes by all of this but 3: it had its turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from core.errors import Rejected, RejectReason
from core.identity import Adapter
from core.membership import Role
from core.messages import Turn
from core.request import GenerateRequest
from router.admission.fair_line import Waiting
from router.admission.forecast import AfterTurn, DrainRate, ExpectedCost
from router.admission.line import Line
from router.admission.policy import AdmissionPolicy, Band
from router.admission.room import Capacity, PromptsOut
from router.view import ClusterView

RECOUNT_S: Final = 0.05  # with 1,000 workers counting them all takes longer than a decision may
LEAST_RETRY_S: Final = 1.0
MOST_RETRY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Shed:
    """One that waited, and is turned away for another."""

    request_id: str
    error: Rejected


class Admission:
    """The requests of one router that have no workers yet. tokens_ahead: see QueuePolicy."""

    def __init__(self, policy: AdmissionPolicy, view: ClusterView, tokens_ahead: int) -> None:
        self.line = Line(policy)
        self.expected = ExpectedCost()
        self.out = PromptsOut()
        self._view = view
        self._tokens_ahead = tokens_ahead
        self._drain = DrainRate()
        self._after = AfterTurn()
        self._capacity = Capacity()
        self._counted_s = -RECOUNT_S

    @property
    def policy(self) -> AdmissionPolicy:
        return self.line.policy

    @policy.setter
    def policy(self, policy: AdmissionPolicy) -> None:
        self.line.policy = policy

    def enter(self, request: GenerateRequest, now: float, max_ttft_s: float | None = None) -> Shed | None:
        """Queue a request. max_ttft_s: what its caller says. Returns: one that makes room for it.

        Raises: Rejected: with the time after which its place is likely to be free.
        """
        item = Waiting(request.request_id, request.tenant, band_of(request), self.expected.of(request), now)
        self._require_soon(item, request.num_prompt_tokens, max_ttft_s, now)
        try:
            shed = self.line.push(item)
        except Rejected as error:
            raise Rejected(error.reason, error.message, self.retry_after_s()) from error
        self._drain.waiting(now)
        if shed is None:
            return None
        message = "the queue is full, and others go before it"
        return Shed(shed.request_id, Rejected(RejectReason.SHED, message, self.retry_after_s()))

    def next(self, now: float) -> str | None:
        """The request whose turn it is, by id; None: nobody waits, or the workers have enough."""
        if not self.line:
            return None
        tokens_ahead = self.policy.queue.tokens_ahead or self._tokens_ahead
        if not self._count(now).has_room(self.out, tokens_ahead):
            return None
        item = self.line.pop(now)
        self._after.turn(item.request_id, self._ahead_s(now), now)
        self._drain.served(item.cost, now)
        self._note_empty()
        return item.request_id

    def served_elsewhere(self, turns: Iterable[Turn]) -> None:
        """Requests that had their turn at other routers: their tenants have had it."""
        for turn in turns:
            band = Band.BATCH if turn.batch else Band.INTERACTIVE
            self.line.charge(turn.tenant, band, self.expected.of_turn(turn))

    def first_token(self, request: GenerateRequest, now: float) -> None:
        """A request of the caller's has its first token."""
        self._after.first_token(request.request_id, request.num_prompt_tokens * self._pace(now), now)

    def leave(self, request_id: str) -> None:
        """It is over, or does not wait any longer."""
        self._after.leave(request_id)
        self.line.remove(request_id)
        self._note_empty()

    def waited_too_long(self, request: GenerateRequest, waited_s: float) -> Rejected:
        """Why a request that waited for its turn, or for workers after it, is turned away."""
        decodes, adapter = self._view.ready_workers(Role.DECODE), request.adapter
        if request.request_id in self.line and decodes:
            message = f"its turn did not come within {waited_s:.0f} s"
            return Rejected(RejectReason.QUEUE_TIMEOUT, message, self.retry_after_s())
        if decodes and adapter is not None and all(adapter not in worker.info.adapters for worker in decodes):
            return no_adapter(adapter)
        missing = "prefill worker" if decodes else "worker"
        return Rejected(RejectReason.NO_WORKER, f"no {missing} became ready within {waited_s:.0f} s")

    def max_wait_s(self, request: GenerateRequest) -> float:
        return self.policy.queue.band(band_of(request)).max_wait_s

    def retry_after_s(self) -> float:
        """When what waits now will have been served."""
        rate = self._drain.tokens_per_s
        return LEAST_RETRY_S if not rate else min(max(LEAST_RETRY_S, self.line.backlog / rate), MOST_RETRY_S)

    def workers_changed(self) -> None:
        """What was counted of them is no longer so."""
        self._counted_s = -RECOUNT_S

    def _note_empty(self) -> None:
        if not self.line:
            self._drain.emptied()

    def _count(self, now: float) -> Capacity:
        if now - self._counted_s >= RECOUNT_S:
            self._capacity, self._counted_s = Capacity.count(self._view, now), now
        return self._capacity

    def _require_soon(self, item: Waiting, prompt_tokens: int, max_ttft_s: float | None, now: float) -> None:
        bounds = [bound for bound in (max_ttft_s, self.policy.queue.band(item.band).max_ttft_s) if bound is not None]
        predicted_s = self._predict_ttft_s(item, prompt_tokens, now) if bounds else None
        if predicted_s is not None and predicted_s > min(bounds):
            raise Rejected(
                RejectReason.SLOW_FIRST_TOKEN,
                f"its first token is predicted in {predicted_s:.3g} s, later than {min(bounds):g} s",
                min(max(LEAST_RETRY_S, predicted_s - min(bounds)), MOST_RETRY_S),
            )

    def _predict_ttft_s(self, item: Waiting, prompt_tokens: int, now: float) -> float | None:
        """The wait in line, then behind what is out, then its own prompt, then what these take longer than they should;
        None before anything is known of the pace.

        Workers learn no pace from very short prompts (router/policy/prefill_queue.py): of these the last term is all.
        """
        pace, num_workers = self._pace(now), self._count(now).num_workers
        rate = self._drain.tokens_per_s or (num_workers / pace if pace else 0.0)
        if not rate or not num_workers:
            return None
        return self.line.wait_s(item, rate) + self._ahead_s(now) + prompt_tokens * pace + self._after.extra_s

    def _ahead_s(self, now: float) -> float:
        """Computing what is out at the workers."""
        capacity = self._count(now)
        tokens = self.out.num_tokens + capacity.others_tokens
        return tokens / max(1, capacity.num_workers) * self._pace(now)

    def _pace(self, now: float) -> float:
        return self._count(now).seconds_per_token or 0.0


def no_adapter(adapter: Adapter) -> Rejected:
    message = f"no ready worker has {adapter.name!r} with the content {adapter.digest[:12]}"
    return Rejected(RejectReason.NO_ADAPTER, message)


def band_of(request: GenerateRequest) -> Band:
    return Band.BATCH if request.priority > 0 else Band.INTERACTIVE
