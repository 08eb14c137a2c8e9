"""Whole clusters walked at random: every stream equals its undisturbed run or ends in a clear error; blocks come back.

A failing seed is reproduced by `TANDEM_SEED=N pytest tests/simulation/test_cluster_world.py`.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

import engine.sequence_maker
import router.dispatcher
from cluster.worker.role import WorkerRole
from cluster.worker.router_streams import RouterStream, RouterStreams
from core.blocks import CacheTier
from core.identity import Adapter, namespace
from core.membership import Life, Role
from core.messages import RefuseReason
from core.request import GenerateRequest
from decode_worker.session import DecodeSession
from engine.scheduler import Scheduler
from kv_transfer.source import SourceSide
from prefill_worker.session import PrefillSession
from router.dispatcher import Dispatcher
from router.flow import Leg
from router.prefix_view import PrefixView
from router.view import ClusterView
from tests.simulation.chained_kv import ADAPTER
from tests.simulation.cluster_world import NO_FAULTS, Faults, World
from tests.simulation.planted_bugs import free_before_quiet
from tests.simulation.world_client import Client

NUM_SEEDS = 120
NUM_SHARED_SEEDS = 40
NUM_REQUESTS = 25
SHARED_FAULTS = Faults(num_disturbances=8)
PRIORITIES = (0, 0, 1, -1, 5)
CHOICES = (1, 3, 1, 1, 2, 1, 1, 5)
TIERS = ((0, 0), (6, 0), (0, 0), (4, 20))  # slots of host memory and disk of each worker
ADAPTERS = (None, ADAPTER, None, None, ADAPTER, None, None)


def run_world(seed: int, faults: Faults | None = None, num_routers: int = 1, num_requests: int = NUM_REQUESTS) -> World:
    adapters = (None,) if faults is ONLY_DRAINS else ADAPTERS
    tiers = TIERS[seed % len(TIERS)]
    world = World(seed, faults or Faults(), PRIORITIES, CHOICES, num_routers, adapters=adapters, tiers=tiers)
    try:
        world.run(num_requests)
    except BaseException as error:
        error.add_note(f"t={world.now:.2f} reproduce: TANDEM_SEED={seed} pytest tests/simulation/test_cluster_world.py")
        raise
    return world


def test_every_stream_is_its_undisturbed_run_or_ends_in_an_error() -> None:
    chosen = os.environ.get("TANDEM_SEED")
    seen: Counter[str] = Counter()
    for seed in [int(chosen)] if chosen else range(NUM_SEEDS):
        world = run_world(seed)
        for client in world.clients:
            seen["finished"] += client.finished
            seen["finished choices"] += client.finished and len(client.expected) > 1
            seen["finished with an adapter"] += client.finished and client.request.adapter is not None
            seen["left"] += client.left
            seen["migrated"] += client.finished and client.num_migrations > 0
            seen["migrated choices"] += client.finished and client.num_migrations > 1 and len(client.expected) > 1
            seen[type(client.error).__name__] += 1
        for (kind, outcome), count in world.drains.items():
            seen[f"{kind} {outcome}"] += count
        seen["preempted"] += sum(host.scheduler.num_preemptions for host in world.hosts.values())
        seen["copied"] += sum(host.memory.copied_blocks for host in world.hosts.values())
        for tier in CacheTier:
            seen[f"{tier} hits"] += sum(host.pool.hit_blocks[tier] for host in world.hosts.values())
    # Every way out is walked, else this proves little.
    ways = ("finished", "finished choices", "finished with an adapter", "left", "migrated", "migrated choices",
            "preempted", "copied", "device hits", "host hits", "disk hits",
            "switch in time", "switch not idle", "end in time")  # fmt: skip
    assert chosen or all(seen[way] for way in (*ways, "Rejected")), seen


def test_routers_share_workers_and_one_that_dies_or_is_cut_off_takes_only_its_own_along() -> None:
    """Each is a dispatcher of its own, with its own view; a worker that one of them lost is taken back by it."""
    chosen = os.environ.get("TANDEM_SEED")
    seen: Counter[str] = Counter()
    for seed in [int(chosen)] if chosen else range(NUM_SHARED_SEEDS):
        world = run_world(seed, SHARED_FAULTS, num_routers=2)
        seen["taken back"] += world.num_taken_back
        for client in world.clients:
            seen["finished"] += client.finished
            seen["left"] += client.left
            seen["migrated"] += client.finished and client.num_migrations > 0
            seen[type(client.error).__name__] += 1
    assert chosen or all(seen[way] for way in ("finished", "left", "migrated", "taken back", "Rejected")), seen


def test_without_faults_every_request_finishes_and_all_of_the_machinery_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: Counter[str] = Counter()
    deliver = Client.deliver

    def count(self: Client, delta, now) -> None:  # type: ignore[no-untyped-def]
        if delta.usage is not None:
            used["cached"] += delta.usage.cached_tokens
            used["fetched"] += delta.usage.fetched_tokens
            used["moved"] += delta.usage.kv_blocks_received
        deliver(self, delta, now)

    monkeypatch.setattr(Client, "deliver", count)
    for seed in range(10):
        world = run_world(seed, NO_FAULTS)  # in a few the pools have no room in time for all batch work
        assert all(client.finished or client.request.priority > 0 for client in world.clients)
        used["preempted"] += sum(host.scheduler.num_preemptions for host in world.hosts.values())
    assert all(used[name] for name in ("cached", "fetched", "moved", "preempted")), used


ONLY_DRAINS = replace(NO_FAULTS, late_s=0.3, num_drains=12, drain_timeout_s=2.6)


# Batch work that finds no room for longer than a worker lets it wait: it asks again, until it has waited its own bound.
NO_ROOM_SEEDS = (64, 131, 148, 153)


def drain_walks(seeds: Iterable[int]) -> tuple[Counter[str], Counter[RefuseReason]]:
    """Worlds in which workers end after a drain or change their roles, and nothing else goes wrong."""
    seen: Counter[str] = Counter()
    refused: Counter[RefuseReason] = Counter()
    for seed in seeds:
        world = run_world(seed, ONLY_DRAINS, num_routers=2, num_requests=10)  # one decode worker has room for them
        failed = [f"seed {seed}: {client.error}" for client in world.clients if client.error is not None]
        assert not failed
        refused += world.refused
        for (kind, outcome), count in world.drains.items():
            seen[f"{kind} {outcome}"] += count
        seen["migrated"] += sum(client.num_migrations > 0 for client in world.clients)
    return seen, refused


def test_no_request_fails_by_drains_and_role_switches_and_none_is_held_up() -> None:
    seen, refused = drain_walks([*range(40), *NO_ROOM_SEEDS])
    assert seen["switch in time"] and seen["end in time"] and seen["migrated"], seen
    assert not seen["switch not idle"] and not seen["end not idle"], seen
    assert refused[RefuseReason.DRAINING] and refused[RefuseReason.WRONG_ROLE], refused


def forget_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that plans nothing new on a draining worker, and leaves there what is there."""
    monkeypatch.setattr(router.dispatcher, "must_leave", lambda *_: [])


def flip_with_open_handoffs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that changes its role once the scheduler has nothing more to do."""

    def only_scheduled(self: WorkerRole[Any]) -> dict[str, int]:
        load = self._scheduler.load()
        return {"scheduled": load.running_requests + load.waiting_requests} if load.running_requests else {}

    monkeypatch.setattr(WorkerRole, "held", only_scheduled)


def plan_to_the_draining(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that gives a draining worker new requests, and moves what leaves it to itself."""
    lives = (Life.READY, Life.DRAINING)
    monkeypatch.setattr(
        ClusterView,
        "ready_workers",
        lambda self, role: [worker for worker in self.workers(role) if worker.life in lives],
    )
    monkeypatch.setattr(ClusterView, "ready_decodes_paired", lambda self: self.ready_workers(Role.DECODE))


@pytest.mark.parametrize(
    ("plant", "seen_as"),
    [
        (forget_to_move, "not idle"),
        (flip_with_open_handoffs, "KeyError"),
        (plan_to_the_draining, "PlannedOntoNobody"),
    ],
)
def test_drain_walks_find_a_planted_bug(plant, seen_as: str, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    plant(monkeypatch)
    found: Counter[str] = Counter()
    for seed in range(40):
        try:
            seen, _ = drain_walks(range(seed, seed + 1))
            found["not idle"] += seen["switch not idle"] + seen["end not idle"]
        except Exception as error:
            found[type(error).__name__] += 1
        if found[seen_as]:
            return
    pytest.fail(f"not found as {seen_as}: {found}")


def test_streams_under_way_are_not_starved_by_requests_that_come() -> None:
    """The pools hold a third of this load: preempted streams wait for what runs, not for every new reservation too."""
    for seed in range(30, 34):
        world = World(seed, NO_FAULTS)
        world.run(num_requests=60)
        gaps = {client.request.request_id: round(client.longest_gap_s, 1) for client in world.clients}
        assert max(gaps.values()) < 10.0, f"seed {seed}: {gaps}"  # 15 to 19 s where new reservations go first


def test_batch_work_waits_for_the_rest_and_still_ends() -> None:
    """Due requests take two thirds of the time of batch work; only batch work waits too long for room."""
    times: dict[int, list[float]] = {0: [], 1: []}
    refused = 0
    for seed in range(40, 46):
        world = World(seed, NO_FAULTS, priorities=(0, 1))
        world.run(num_requests=50)
        for client in world.clients:
            if client.error is not None:
                assert client.request.priority == 1, f"seed {seed}: {client.error}"
                refused += 1
            else:
                times[client.request.priority].append(client.last_s - client.submitted_s)
    due, batch = (statistics.mean(times[priority]) for priority in (0, 1))
    assert due * 1.4 < batch  # 2.3 s and 3.6 s
    assert refused < 0.05 * 50 * 6


def push_without_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that lets its blocks be reused while they are being pushed."""
    ready, settled = SourceSide.blocks_ready, SourceSide.push_settled

    def ready_and_let_go(self: SourceSide, *arguments, **options):  # type: ignore[no-untyped-def]
        effects = ready(self, *arguments, **options)
        for push in effects:
            self._blocks.release(push.source_blocks)
        return effects

    def take_and_settle(self: SourceSide, handoff_id, sequence, **options):  # type: ignore[no-untyped-def]
        self._open[handoff_id].in_flight[sequence] = ()
        return settled(self, handoff_id, sequence, **options)

    monkeypatch.setattr(SourceSide, "blocks_ready", ready_and_let_go)
    monkeypatch.setattr(SourceSide, "push_settled", take_and_settle)


def one_cache_for_all_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix hits across tenants."""

    def root(digest: bytes, _tenant: str, _salt: str, adapter: Adapter | None) -> bytes:
        return namespace(digest, "", "", adapter)

    monkeypatch.setattr(engine.sequence_maker, "namespace", root)


def one_cache_for_all_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix hits across the model and its adapters."""

    def root(digest: bytes, tenant: str, salt: str, _adapter: Adapter | None) -> bytes:
        return namespace(digest, tenant, salt)

    monkeypatch.setattr(engine.sequence_maker, "namespace", root)


def forget_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream goes on elsewhere with the model as it is."""
    rest_of = Leg._rest_of

    def bare(self: Leg, index: int) -> GenerateRequest:
        return replace(rest_of(self, index), adapter=None)

    monkeypatch.setattr(Leg, "_rest_of", bare)


def free_under_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled sequence gives its blocks back while the step in flight still writes them."""
    cancel = Scheduler.cancel

    def cancel_and_free(self: Scheduler, request_id: str) -> bool:
        found = cancel(self, request_id)
        for sequence in self._sequences.get(request_id, ()):
            self.pool.release(sequence.drop_blocks())
        return found

    monkeypatch.setattr(Scheduler, "cancel", cancel_and_free)


def use_attempt_ids_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that leaves and asks again under its old request id meets what is left of its first attempt."""
    init = Dispatcher.__init__

    def forgetful(self: Dispatcher, config, view, router_id):  # type: ignore[no-untyped-def]
        init(self, config, view, router_id)
        self._books._serials = itertools.repeat(1)  # type: ignore[assignment]

    monkeypatch.setattr(Dispatcher, "__init__", forgetful)


def land_a_prefix_one_block_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetched blocks become findable under their neighbours' hashes."""
    landed = PrefillSession.landed

    def shifted(self: PrefillSession, outcome):  # type: ignore[no-untyped-def]
        return landed(self, replace(outcome, blocks=outcome.blocks[::-1]))

    monkeypatch.setattr(PrefillSession, "landed", shifted)


def forget_hits_on_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled reservation keeps its prefix hits for ever."""
    cancel = DecodeSession.cancel

    def keep_hits(self: DecodeSession, request_id: str, now: float):  # type: ignore[no-untyped-def]
        reserved = self._reserved.get(self._handoff_of.get(request_id, ""))
        if reserved is not None:
            reserved.hits = []
        return cancel(self, request_id, now)

    monkeypatch.setattr(DecodeSession, "cancel", keep_hits)


def go_on_as_if_the_output_were_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A migrated stream counts its positions from 0 again, and so its seeds and max_tokens."""
    rest_of = Leg._rest_of

    def naive(self: Leg, index: int) -> GenerateRequest:
        request = rest_of(self, index)
        prompt = (*request.prompt_token_ids, *request.output_token_ids)
        return replace(request, prompt_token_ids=prompt, output_token_ids=())

    monkeypatch.setattr(Leg, "_rest_of", naive)


def go_on_with_the_first_choice_s_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A migrated choice goes on as another one."""
    rest_of = Leg._rest_of

    def mixed_up(self: Leg, index: int) -> GenerateRequest:
        return replace(rest_of(self, index), sampling=self.flow.request.sampling)

    monkeypatch.setattr(Leg, "_rest_of", mixed_up)


def take_events_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that does not see that it missed what a worker said of its cache."""

    def hear(self: PrefixView, slot: int, told, events) -> None:  # type: ignore[no-untyped-def]
        told.last, told.whole = events.sequence, True
        self._take(slot, told, events)

    monkeypatch.setattr(PrefixView, "_hear", hear)


def believe_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is gone goes on to be known for its cache."""
    monkeypatch.setattr(PrefixView, "leave", lambda self, slot: None)


@pytest.mark.parametrize(
    ("plant", "seen_as"),
    [
        (take_events_as_they_come, "WrongView"),
        (believe_the_dead, "WrongView"),
        (lambda monkeypatch: free_before_quiet(monkeypatch.setattr), "WriteIntoForeignBlock"),
        (push_without_a_reference, "WrongStream"),
        (one_cache_for_all_salts, "WrongStream"),
        (one_cache_for_all_adapters, "WrongStream"),
        (forget_the_adapter, "WrongStream"),
        (free_under_a_step, "WriteIntoForeignBlock"),
        (use_attempt_ids_again, "InvariantBroken"),
        (land_a_prefix_one_block_off, "WrongStream"),
        (forget_hits_on_cancel, "Leak"),
        (go_on_as_if_the_output_were_prompt, "WrongStream"),
        (go_on_with_the_first_choice_s_seed, "WrongStream"),
    ],
)
def test_the_walks_find_a_planted_bug(plant, seen_as: str, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Each bug must be seen as what it is, within as many walks as the test above makes."""
    plant(monkeypatch)
    assert_found(seen_as, NUM_SEEDS)


def assert_found(seen_as: str, num_seeds: int, faults: Faults | None = None, num_routers: int = 1) -> None:
    found: Counter[str] = Counter()
    for seed in range(num_seeds):
        try:
            run_world(seed, faults, num_routers)
        except Exception as error:
            found[type(error).__name__] += 1
        if found[seen_as]:
            return
    pytest.fail(f"not found as {seen_as} in {num_seeds} walks: {found}")


def go_on_without_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker goes on with what came over the stream of a router that died, or lost it."""

    def forget(self: RouterStreams, stream: RouterStream) -> list[str]:
        close(self, stream)
        return []

    close = RouterStreams.close
    monkeypatch.setattr(RouterStreams, "close", forget)


@pytest.mark.parametrize(("plant", "seen_as"), [(go_on_without_a_router, "WorkForNobody")])
def test_the_walks_of_several_routers_find_a_planted_bug(plant, seen_as: str, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    plant(monkeypatch)
    assert_found(seen_as, NUM_SHARED_SEEDS, SHARED_FAULTS, num_routers=2)
