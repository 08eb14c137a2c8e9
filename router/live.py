"""Drives the quiet dispatcher: a clock, a link to each worker, and a queue for each open request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from core.errors import BadRequest, Rejected, RejectReason, TandemError
from core.membership import Life, Role, WorkerInfo, WorkerLoad, WorkerRef
from core.messages import Answer, PeerDead, PeerJoined
from core.request import GenerateRequest, Placement, TokenDelta
from router.admission.limits import TenantLimits
from router.admission.policy import TenantPolicy
from router.config import RouterConfig
from router.dispatcher import Dispatcher
from router.effects import Deliver, Effect, Fail, Planned, RaceEnded, Send
from router.limiter import Limiter, OwnLimiter
from router.outbox import Outbox, Turns
from router.policy.prompt_keys import prompt_keys
from router.policy_file import Policy
from router.shared_limits import SharedLimiter
from router.traces import RequestTraces
from router.view import ClusterView
from router.worker_link import WorkerLink
from telemetry.logs import log_state
from telemetry.router_metrics import RouterState, RoutingMetrics
from telemetry.tasks import Spawn

if TYPE_CHECKING:  # it loads OpenTelemetry
    from telemetry.tracing import Tracer

logger = logging.getLogger(__name__)

LIVES: Final = (Life.STARTING, Life.READY, Life.DRAINING)  # one that is GONE is no longer known
MAX_DEATHS: Final = 1024  # last deaths told to each worker that links up


class LiveDispatcher:
    """What the fronts generate through, and what workers register with. All calls come from one event loop.

    spawn: runs a task and watches over it. tracer: None when nothing is traced.
    """

    def __init__(
        self,
        config: RouterConfig,
        router_id: str,
        spawn: Spawn,
        metrics: RoutingMetrics,
        tracer: Tracer | None = None,
    ) -> None:
        self._config = config
        self.router_id = router_id
        self._spawn = spawn
        self._metrics = metrics
        self._traces = RequestTraces(tracer)
        self.view = ClusterView()
        self._dispatcher = Dispatcher(config.dispatcher, self.view, router_id)
        self._limiter = self._make_limiter()
        self._links: dict[WorkerRef, WorkerLink] = {}
        self._deaths: deque[WorkerRef] = deque(maxlen=MAX_DEATHS)
        self._outputs: dict[str, Outbox] = {}
        self._turns = Turns()
        self._idle = asyncio.Event()
        self._closing = False

    @property
    def num_open(self) -> int:
        return self._dispatcher.num_open

    @property
    def num_queued(self) -> int:
        return self._dispatcher.num_queued

    def apply(self, policy: Policy) -> None:
        """What an operator says from now on; of what is open already nothing changes."""
        self._dispatcher.admission.policy = policy.admission
        self._dispatcher.planner.routing = policy.routing

    def state(self) -> RouterState:
        """For a scrape."""
        workers = self.view.workers()
        decodes = [worker for worker in workers if worker.info.role is Role.DECODE]
        lives: dict[tuple[str, str], int] = {(role, life): 0 for role in Role for life in LIVES}
        lives.update(Counter((worker.info.role, worker.life) for worker in workers))
        return RouterState(
            queued_requests=self.num_queued,
            waiting_requests=self._dispatcher.admission.line.lengths(),
            workers=lives,
            held_blocks=sum(worker.load.used_blocks + worker.load.quarantined_blocks for worker in decodes),
            num_blocks=sum(worker.info.num_blocks for worker in decodes),
            known_blocks=self.view.prefixes.num_keys,
            cache_gaps=self.view.prefixes.num_gaps,
            avoided_places=self._dispatcher.planner.breakers.num_open,
            block_size=max((worker.info.block_size for worker in decodes), default=0),
        )

    def why_not_ready(self) -> str | None:
        """What is missing to serve a request, or None."""
        if self._closing:
            return "shutting down"
        return None if self.view.has_ready(Role.DECODE) else "no ready decode worker"

    async def generate(
        self, request: GenerateRequest, placement: Placement, max_ttft_s: float | None = None
    ) -> AsyncGenerator[TokenDelta, None]:
        """Each output position of each choice once, in order. Closing the generator frees the request everywhere.
        max_ttft_s: as in Dispatcher.submit.

        Raises: Rejected: its tenant has what it may have, it is not taken, or there is no worker in time.
            BadRequest: a worker can never serve it.
            WorkerLost, TransferFailed: its workers were lost too often (DispatcherConfig).
        """
        if self._closing:
            raise Rejected(RejectReason.DRAINING, "this router is shutting down")
        expected_tokens = self._dispatcher.admission.expected.of(request)
        permit = await self._limiter.take(request.tenant, expected_tokens, request.num_choices)
        used_tokens = request.num_prompt_tokens
        try:
            keys = await self._keys(request)
            effects = self._dispatcher.submit(request, placement, time.monotonic(), max_ttft_s, keys)
            self._traces.begin(request)
            output = self._outputs[request.request_id] = Outbox(self._turns)
            try:
                self._perform(effects)
                while True:
                    for item in await output.take():
                        if item is None:
                            return
                        if isinstance(item, TandemError):
                            raise item
                        used_tokens += len(item.token_ids)
                        yield item
            finally:
                del self._outputs[request.request_id]
                output.close()
                if not self._outputs:
                    self._idle.set()
                self._traces.end(request.request_id)
                self._perform(self._dispatcher.cancel(request.request_id, time.monotonic()))
        except (Rejected, BadRequest):
            if used_tokens == request.num_prompt_tokens:  # what we turn away costs nothing; what has tokens was served
                used_tokens = 0
            raise
        finally:
            self._limiter.give_back(permit, used_tokens)

    async def _keys(self, request: GenerateRequest) -> list[int]:
        """For routing by prefix. Long prompts are hashed in pieces, between which the loop serves others: a thread
        would keep it waiting for the interpreter's lock, 5 ms at a time."""
        keys: list[int] = []
        workers = self.view.workers()
        if workers:
            for piece in prompt_keys(request, workers[0].info):
                if keys:
                    await asyncio.sleep(0)
                keys += piece
        return keys

    def announce(self, info: WorkerInfo, load: WorkerLoad) -> None:
        """A worker says that it lives. Raises BadRequest: it cannot belong to this cluster, or is reported dead."""
        worker = self.view.get(info.ref)
        if worker is not None:
            worker.load = load
            return
        if len(self.view.workers()) >= self._config.max_workers:
            raise BadRequest("worker", f"this router takes at most {self._config.max_workers} workers")
        self.view.register(info, time.monotonic())
        log_state(logger, worker_id=info.ref, state="starting", address=info.address)
        self._links[info.ref] = WorkerLink(
            info,
            self.router_id,
            self._config.silence_timeout_s,
            on_open=lambda: self._opened(info),
            on_answer=lambda answer: self._answered(info.ref, answer),
            on_closed=lambda reason: self._lost(info.ref, reason),
            spawn=self._spawn,
        )

    async def report_death(self, ref: WorkerRef) -> None:
        """The process of `ref` has ended: tell every worker that nothing more can come from it."""
        self.view.bury(ref)  # first: it may announce itself while we wait
        link = self._links.get(ref)
        if link is not None:
            await link.close()
            self._lost(ref, "its process ended")
        self._deaths.append(ref)
        for other in self._links.values():
            other.send(PeerDead(ref))

    async def tick_forever(self, interval_s: float = 0.25) -> None:
        """Let waits end; runs until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            self._perform(self._dispatcher.tick(time.monotonic()))

    async def close(self, grace_s: float) -> None:
        """Take nothing new, let what is open finish for `grace_s`, then end it and every link."""
        self._closing = True
        if self._outputs:
            self._idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._idle.wait()
        for output in self._outputs.values():
            output.put(Rejected(RejectReason.DRAINING, "this router is shutting down"))
        # They stay in `_links`: a slow client's request may still be cancelled over one.
        await asyncio.gather(*(link.close() for link in self._links.values()))
        await self._limiter.close()

    def _make_limiter(self) -> Limiter:
        def policy_of(tenant: str) -> TenantPolicy:
            return self._dispatcher.admission.policy.tenant(tenant)

        own, url = TenantLimits(policy_of), self._config.redis_url
        if url is None:
            return OwnLimiter(own)
        shared = SharedLimiter(url, self._config.model_name, self.router_id, own, policy_of, self._spawn)
        self._spawn(shared.renew_forever())
        return shared

    def _opened(self, info: WorkerInfo) -> None:
        """The worker is READY: introduce it to the others, and them to it."""
        self.view.ready(info.ref)
        log_state(logger, worker_id=info.ref, state="ready", role=info.role)
        link = self._links[info.ref]
        for ref in self._deaths:  # it may have dealt with the dead under an earlier router, and hold blocks for them
            link.send(PeerDead(ref))
        for other in self.view.workers():
            if other.ref != info.ref and other.life is not Life.STARTING:
                link.send(PeerJoined(other.info))
                self._links[other.ref].send(PeerJoined(info))
        self._perform(self._dispatcher.serve_queue(time.monotonic()))

    def _answered(self, ref: WorkerRef, answer: Answer) -> None:
        self._traces.heard(answer)
        self._perform(self._dispatcher.answered(ref, answer, time.monotonic()))

    def _lost(self, ref: WorkerRef, reason: str) -> None:
        log_state(logger, logging.WARNING, worker_id=ref, state="gone", reason=reason)
        self._links.pop(ref, None)
        if (worker := self.view.get(ref)) is not None:
            self._metrics.worker_lost(worker.info.role)
        self._traces.worker_lost(ref)
        self._perform(self._dispatcher.worker_lost(ref, time.monotonic()))

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(worker, command):
                    self._links[worker].send(self._traces.outgoing(command))
                case Deliver(request_id, delta, last):
                    self._put(request_id, delta)
                    if last:
                        self._traces.end(request_id)
                        self._put(request_id, None)
                case Fail(request_id, error):
                    self._traces.end(request_id, str(error))
                    self._put(request_id, error)
                case RaceEnded(request_id, won):
                    self._metrics.race_ended(won=won)
                    log_state(logger, request_id=request_id, state="hedge_won" if won else "hedge_lost")
                case Planned(request_id, attempt, attempt_id, plan, waited_s, hedge):
                    self._traces.planned(effect)
                    best = plan.scores[0]
                    number = None if hedge else attempt
                    self._metrics.planned(plan.reason, number, waited_s, best.hit_tokens, best.fetched_tokens)
                    log_state(
                        logger,
                        request_id=request_id,
                        attempt_id=attempt_id,
                        state="hedged" if hedge else "planned",
                        reason=plan.reason,
                        decode=plan.decode,
                        prefill=plan.prefill,
                        scores="; ".join(map(str, plan.scores)),
                    )
        self._traces.settled()

    def _put(self, request_id: str, item: TokenDelta | TandemError | None) -> None:
        output = self._outputs.get(request_id)
        if output is not None:
            output.put(item)
