"""Workers that come, go, drain and change their roles without end: no counter below zero, ready only when one is."""

from __future__ import annotations

import random
from itertools import count

import pytest

from core.errors import BadRequest
from core.membership import GivenWork, Life, Role, WorkerLoad, WorkerRef
from core.messages import (
    CacheEvents,
    Draining,
    PeerConnected,
    Refused,
    RefuseReason,
    ReserveBlocks,
    Serving,
    StartGeneration,
    StepOutput,
)
from core.request import FinishReason, GenerateRequest, Placement, SamplingParams, StopConditions, TokenDelta
from router import view
from router.config import DispatcherConfig
from router.dispatcher import Dispatcher
from router.effects import Effect, Send
from router.view import ClusterView
from tests.worker_info import worker_info

NUM_SEEDS = 1000
NUM_STEPS = 40
PLACES = ("p0", "p1", "d0", "d1")


class Cluster:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.view = ClusterView()
        self.dispatcher = Dispatcher(DispatcherConfig(), self.view, "x")
        self.refs: dict[str, WorkerRef] = {}
        self.attempts: list[tuple[WorkerRef, str]] = []
        self.lives, self.sequence, self.now = count(1), count(1), 0.0

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.command, StartGeneration | ReserveBlocks):
                self.attempts.append((effect.worker, effect.command.request.request_id))

    def step(self) -> None:
        rng, now, dispatcher = self.rng, self.now, self.dispatcher
        self.now += rng.random()
        place = rng.choice(PLACES)
        ref = self.refs.get(place)
        match rng.randrange(10):
            case 0 | 1 if ref is None:
                ref = self.refs[place] = WorkerRef(place, str(next(self.lives)))
                role = Role.PREFILL if place[0] == "p" else Role.DECODE
                self.view.register(worker_info(ref, role), now)
                if rng.random() < 0.8:
                    self.view.ready(ref)
                self.take(dispatcher.serve_queue(now))
            case 2 if ref is not None:
                del self.refs[place]
                self.take(dispatcher.worker_lost(ref, now))
            case 3 if ref is not None:
                answer = rng.choice([Draining(rng.random()), Serving(rng.choice(list(Role)))])
                self.take(dispatcher.answered(ref, answer, now))
            case 4 | 5:
                request = GenerateRequest(
                    f"r{next(self.lives)}", tuple(range(40)), SamplingParams(), StopConditions(max_tokens=2)
                )
                self.take(dispatcher.submit(request, rng.choice(list(Placement)), now, keys=(1, 2)))
            case 6 | 7 if self.attempts:
                worker, attempt = rng.choice(self.attempts)
                delta = TokenDelta(attempt, 0, (5,), rng.choice([None, FinishReason.LENGTH]))
                refused = Refused(attempt, rng.choice(list(RefuseReason)))
                answer = rng.choice([StepOutput((delta,), WorkerLoad()), refused])
                self.take(dispatcher.answered(worker, answer, now))
            case 8 if ref is not None:
                events = CacheEvents(next(self.sequence), rng.randbytes(8), b"", reset=rng.random() < 0.5)
                self.take(dispatcher.answered(ref, StepOutput((), WorkerLoad(), GivenWork(), events), now))
            case 9 if ref is not None:
                for other in self.refs.values():
                    if other != ref:
                        for one, peer in ((ref, other), (other, ref)):
                            self.take(dispatcher.answered(one, PeerConnected(peer, "lane", 1.0), now))

    def check(self) -> None:
        workers = self.view.workers()
        for worker in workers:
            counters = worker.open_tokens, worker.prefills.num_tokens, worker.prompt_tokens
            assert min(*counters, worker.kv_tokens) >= 0, counters
            assert all(worker.slot in self.view.at(slot).links for slot in worker.links)
        assert len({worker.slot for worker in workers}) == len(workers)
        for role in Role:
            ready = [worker for worker in workers if worker.life is Life.READY and worker.info.role is role]
            assert self.view.ready_workers(role) == ready
            assert self.view.has_ready(role) is bool(ready)
            assert self.view.ready_slots(role) == sum(1 << worker.slot for worker in ready)
        out = self.dispatcher.admission.out
        assert min(out.num_prompts, out.num_tokens, out.unplaced_prompts, out.unplaced_tokens) >= 0


def test_no_counter_falls_below_zero_and_no_role_is_ready_that_is_not() -> None:
    for seed in range(NUM_SEEDS):
        cluster = Cluster(seed)
        try:
            for _ in range(NUM_STEPS):
                cluster.step()
                cluster.check()
            for ref in cluster.refs.values():
                cluster.take(cluster.dispatcher.worker_lost(ref, cluster.now))
            cluster.take(cluster.dispatcher.tick(1e9))
            assert cluster.dispatcher.num_open == 0
            assert cluster.view.prefixes.num_keys == 0
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_the_dead_are_remembered_within_a_bound_and_one_that_still_comes_is_never_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(view, "MOST_DEAD", 10)
    known = ClusterView()

    def come(name: str) -> None:
        info = worker_info(WorkerRef("d0", name))
        known.register(info, now=0.0)

    known.bury(WorkerRef("d0", "lives"))
    for life in range(100):
        known.bury(WorkerRef("d0", str(life)))
        if life % 5 == 0:
            with pytest.raises(BadRequest, match="reported dead"):
                come("lives")
    assert len(known._dead) == 10
    for refused in ("99", "lives"):
        with pytest.raises(BadRequest, match="reported dead"):
            come(refused)
    come("0")  # the control: silent while many others died
