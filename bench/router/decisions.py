"""One choice of workers (router/policy/choose.py) and the books it writes, with 10, 100 and 1,000 workers that cache a
million different blocks together, all paired; and hashing a prompt, once a request. Half of the workers are prefill
workers. Of the requests a third is new, a third begins with one of 64 prefixes that a third of the workers have (1,024
tokens), a third goes on with a conversation that one or two workers have (1,600 tokens); half have a session. Then the
same where the end of each of these, from a place of its own on each worker, is in host memory or on a disk there.
Times are of this thread's CPU: on a shared machine the clock says what others do.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from itertools import product
from typing import Final

from core.blocks import CacheTier
from core.identity import KEY_BYTES
from core.membership import GivenWork, Role, WorkerInfo, WorkerLoad, WorkerRef
from core.messages import CacheEvents, PeerConnected
from core.request import GenerateRequest, Placement, SamplingParams, StopConditions
from router.policy.choose import Ask, choose
from router.policy.prompt_keys import prompt_keys
from router.policy.routing_policy import RoutingPolicy
from router.view import ClusterView

NUM_WORKERS: Final = (10, 100, 1000)
NUM_KEYS: Final = 1_000_000
NUM_PREFIXES: Final = 64
PREFIX_BLOCKS: Final = 64
TALK_BLOCKS: Final = 100
BLOCK_SIZE: Final = 16
BLOCK_BYTES: Final = 720 << 10
NUM_DECISIONS: Final = 3000
NUM_OPEN: Final = 4  # requests open on each worker
PROMPTS: Final = (100, 2_000, 100_000)  # tokens


class Cluster:
    """A view of many workers, as it is after hours of serving."""

    def __init__(self, num_workers: int, rng: random.Random, *, tiered: bool = False) -> None:
        self.rng = rng
        self.tiered = tiered
        self.view = ClusterView()
        self.prefixes = [self._fresh_keys(PREFIX_BLOCKS) for _ in range(NUM_PREFIXES)]
        self.talks: list[list[int]] = []
        caches: list[dict[int, CacheTier]] = [{} for _ in range(num_workers)]
        for prefix in self.prefixes:
            for cache in rng.sample(caches, -(-num_workers // 3)):
                cache.update(self._placed(prefix))
        while len(self.talks) * TALK_BLOCKS + NUM_PREFIXES * PREFIX_BLOCKS < NUM_KEYS:
            talk = self._fresh_keys(TALK_BLOCKS)
            self.talks.append(talk)
            for cache in rng.sample(caches, rng.choice((1, 2))):
                cache.update(self._placed(talk))
        for number, cache in enumerate(caches):
            self._join(number, cache)
        workers = self.view.workers()
        for worker in workers:
            link = PeerConnected(worker.ref, "network", rng.uniform(1.0, 10.0))
            for other in workers:
                if other is not worker:
                    self.view.connected(other.ref, link)

    def _fresh_keys(self, num_blocks: int) -> list[int]:
        return [self.rng.getrandbits(8 * KEY_BYTES) for _ in range(num_blocks)]

    def _placed(self, keys: list[int]) -> dict[int, CacheTier]:
        if not self.tiered:
            return dict.fromkeys(keys, CacheTier.DEVICE)
        ends = sorted(self.rng.randrange(len(keys) + 1) for _ in range(2))
        tiers = (CacheTier.DEVICE, CacheTier.HOST, CacheTier.DISK)
        return {key: tiers[(index >= ends[0]) + (index >= ends[1])] for index, key in enumerate(keys)}

    def _join(self, number: int, cache: dict[int, CacheTier]) -> None:
        role = Role.DECODE if number % 2 else Role.PREFILL
        ref = WorkerRef(f"{role}-{number}", "1")
        self.view.register(
            WorkerInfo(ref, role, "", b"id", BLOCK_SIZE, BLOCK_BYTES, len(cache) + 1000, 1 << 20), now=0.0
        )
        self.view.ready(ref)
        stored, host, disk = (
            b"".join(key.to_bytes(KEY_BYTES, "little") for key, place in cache.items() if place is tier)
            for tier in CacheTier
        )
        self.view.heard_cache(ref, CacheEvents(1, stored, b"", reset=True, host=host, disk=disk), 0.0)
        self.view.heard(ref, WorkerLoad(), GivenWork(1, self.rng.randrange(16000), self.rng.randrange(4000)), 0.0)
        self.view.learn_pace(ref, 0.0, self.rng.uniform(0.2, 0.4), 1000)

    def ask(self, number: int) -> Ask:
        match number % 3:
            case 0:
                keys = self._fresh_keys(125)
            case 1:
                keys = self.rng.choice(self.prefixes) + self._fresh_keys(20)
            case _:
                keys = self.rng.choice(self.talks) + self._fresh_keys(5)
        tokens = (0,) * (len(keys) * BLOCK_SIZE + 1)
        session = str(number) if number % 2 else ""
        request = GenerateRequest(
            f"r{number}", tokens, SamplingParams(), StopConditions(max_tokens=256), session_id=session
        )
        return Ask(request, Placement.AUTO, keys)


def time_decisions(num_workers: int, *, tiered: bool) -> list[float]:
    """CPU seconds of each choice with its books; for each request that comes the oldest ends, outside of the time."""
    rng = random.Random(num_workers)
    cluster = Cluster(num_workers, rng, tiered=tiered)
    view, policy = cluster.view, RoutingPolicy()
    open_plans: list[tuple[WorkerRef, WorkerRef, int, int]] = []
    gc.collect()
    gc.freeze()
    taken_s = []
    for number in range(NUM_DECISIONS):
        ask = cluster.ask(number)
        begun_s = time.thread_time()
        plan = choose(ask, view, policy, 2.0, 0.0, rng)
        assert plan is not None
        num_tokens, computed = ask.request.num_given_tokens, plan.scores[0].computed_tokens
        view.assign(plan.decode, num_tokens)
        view.begin_prefill(plan.prefiller, computed)
        taken_s.append(time.thread_time() - begun_s)
        open_plans.append((plan.decode, plan.prefiller, num_tokens, computed))
        if len(open_plans) > NUM_OPEN * num_workers:
            decode, prefiller, num_tokens, computed = open_plans.pop(0)
            view.unassign(decode, num_tokens)
            view.end_prefill(prefiller, computed)
    gc.unfreeze()
    return taken_s


def decisions() -> None:
    print(f"{NUM_KEYS:,} blocks cached\n")
    print("| workers | caches | decision p50, us | p99, us | most, us |\n| --- | --- | --- | --- | --- |")
    for num_workers, tiered in product(NUM_WORKERS, (False, True)):
        taken_us = sorted(taken_s * 1e6 for taken_s in time_decisions(num_workers, tiered=tiered))
        p50, p99 = taken_us[len(taken_us) // 2], taken_us[len(taken_us) * 99 // 100]
        where = "in tiers" if tiered else "on devices"
        print(f"| {num_workers:,} | {where} | {p50:.0f} | {p99:.0f} | {taken_us[-1]:.0f} |", flush=True)
    print("\n| prompt, tokens | hashing, ms | longest piece, ms |\n| --- | --- | --- |")
    info = WorkerInfo(WorkerRef("d", "1"), Role.DECODE, "", bytes(32), BLOCK_SIZE, BLOCK_BYTES, 1000, 1 << 20)
    for num_tokens in PROMPTS:
        request = GenerateRequest("r", tuple(range(num_tokens)), SamplingParams(), StopConditions(max_tokens=1))
        whole, longest = zip(*(time_hashing(request, info) for _ in range(9)), strict=True)
        print(f"| {num_tokens:,} | {statistics.median(whole) * 1e3:.2f} | {statistics.median(longest) * 1e3:.2f} |")


def time_hashing(request: GenerateRequest, info: WorkerInfo) -> tuple[float, float]:
    """Seconds for all pieces, and for the longest one, which is how long the router's loop waits."""
    pieces, pieces_s = prompt_keys(request, info), []
    while True:
        begun_s = time.thread_time()
        more = next(pieces, None)
        pieces_s.append(time.thread_time() - begun_s)
        if more is None:
            return sum(pieces_s), max(pieces_s)
