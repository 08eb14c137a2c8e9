"""Which workers are chosen: a few workers in, expected choice and costs out."""

from __future__ import annotations

import math
import random

import pytest

from core.identity import KEY_BYTES
from core.membership import GivenWork, Role, WorkerLoad, WorkerRef
from core.messages import CacheEvents, PeerConnected
from core.request import GenerateRequest, Placement, SamplingParams, StopConditions
from router.policy import candidates
from router.policy.choose import Ask, Plan, PlanReason, choose
from router.policy.routing_policy import MOST, RoutingPolicy
from router.policy.transfer import FIRST_SHARE
from router.view import ClusterView
from tests.worker_info import worker_info

BLOCK_SIZE = 16
BLOCK_BYTES = 1_000_000
NUM_TOKENS = 20 * BLOCK_SIZE + 1
PROMPT = range(100, 120)  # its routing keys


class Cluster:
    """A view of workers named p0, p1, ..., d0, d1, ..., all paired."""

    def __init__(self, *names: str, gbps: float = 1.0) -> None:
        self.view = ClusterView()
        self.refs: dict[str, WorkerRef] = {}
        self.rng = random.Random(1)
        for name in names:
            role = Role.PREFILL if name[0] == "p" else Role.DECODE
            ref = self.refs[name] = WorkerRef(name, "1")
            self.view.register(worker_info(ref, role, block_bytes=BLOCK_BYTES, num_blocks=1000), now=0.0)
            self.view.ready(ref)
        for one in names:
            for other in names:
                if one != other:
                    self.link(one, other, gbps)

    def link(self, one: str, other: str, gbps: float) -> None:
        self.view.connected(self.refs[one], PeerConnected(self.refs[other], "lane", gbps))

    def cache(self, name: str, num_blocks: int, prompt: range = PROMPT) -> None:
        stored = b"".join(key.to_bytes(KEY_BYTES, "little") for key in prompt[:num_blocks])
        self.view.heard_cache(self.refs[name], CacheEvents(1, stored, b"", reset=True), 0.0)

    def cache_below(self, name: str, num_device: int, num_host: int, num_disk: int) -> None:
        """The prompt's beginning, from the device downwards."""
        packed = [key.to_bytes(KEY_BYTES, "little") for key in PROMPT]
        ends = (num_device, num_device + num_host, num_device + num_host + num_disk)
        stored, host, disk = packed[: ends[0]], packed[ends[0] : ends[1]], packed[ends[1] : ends[2]]
        events = CacheEvents(1, b"".join(stored), b"", True, b"".join(host), b"".join(disk))
        self.view.heard_cache(self.refs[name], events, 0.0)

    def load(self, name: str, num_tokens: int, now: float = 0.0) -> None:
        """Given by another router."""
        self.view.heard(self.refs[name], WorkerLoad(), GivenWork(1, num_tokens, num_tokens), now)

    def pace(self, name: str, seconds_per_token: float) -> None:
        self.view.learn_pace(self.refs[name], 0.0, 1000 * seconds_per_token, 1000)

    def plan(
        self,
        placement: Placement = Placement.AUTO,
        prompt: range = PROMPT,
        now: float = 0.0,
        session: str = "",
        avoided: frozenset[str] = frozenset(),
        **config: float,
    ) -> Plan:
        request = GenerateRequest(
            "r", tuple(range(NUM_TOKENS)), SamplingParams(), StopConditions(max_tokens=8), session_id=session
        )
        policy, local_cost = RoutingPolicy(**config), config.get("local_prefill_cost", 2.0)
        plan = choose(Ask(request, placement, prompt), self.view, policy, local_cost, now, self.rng, avoided)
        assert plan is not None
        return plan

    def chosen(self, *args, **options) -> str:  # type: ignore[no-untyped-def]
        plan = self.plan(*args, **options)
        return plan.decode.worker_id if plan.prefill is None else f"{plan.prefill.worker_id}>{plan.decode.worker_id}"


def test_who_caches_the_prefix_is_chosen_and_for_another_prefix_the_idle_one_is() -> None:
    cluster = Cluster("d0", "d1")
    cluster.cache("d1", 20)
    cluster.load("d1", 160)
    assert cluster.chosen() == "d1"
    assert cluster.plan().scores[0].computed_tokens == 1
    assert cluster.chosen(prompt=range(500, 520)) == "d0"
    cluster.load("d0", 320)
    assert cluster.chosen(prompt=range(500, 520)) == "d1"


def test_overlap_is_weighed_by_tier() -> None:
    """d0 has 8 blocks in host memory, which is worth 6 of the device."""
    for num_device, best in ((5, "d0"), (7, "d1")):
        cluster = Cluster("d0", "d1")
        cluster.cache_below("d0", 0, 8, 0)
        cluster.cache_below("d1", num_device, 0, 0)
        assert cluster.chosen() == best
        assert cluster.chosen(host_overlap_weight=1.0) == "d0"
        assert cluster.chosen(host_overlap_weight=0.0) == "d1"
    for num_host, best in ((2, "d0"), (4, "d1")):  # 8 on the disk, worth 2 of the device, 2.67 of the host
        cluster = Cluster("d0", "d1")
        cluster.cache_below("d0", 0, 0, 8)
        cluster.cache_below("d1", 0, num_host, 0)
        assert cluster.chosen() == best
        assert cluster.chosen(disk_overlap_weight=0.75) == "d0"


def test_the_uncached_part_of_a_score_is_that_of_the_tiers_weights() -> None:
    cluster = Cluster("d0")
    cluster.cache_below("d0", 10, 6, 4)
    (score,) = cluster.plan(Placement.LOCAL).scores
    assert score.uncached == NUM_TOKENS - (10 * 1.0 + 6 * 0.75 + 4 * 0.25) * BLOCK_SIZE
    assert (score.hit_tokens, score.computed_tokens) == (20 * BLOCK_SIZE, 1)


def test_a_peer_pushes_only_what_it_has_on_the_device() -> None:
    """p1, which is busy, caches all of the prompt; p0 may fetch what of it is on p1's device."""
    for num_device, fetched in ((20, 20), (10, 10), (0, 0)):
        cluster = Cluster("p0", "p1", "d0", gbps=10.0)
        cluster.pace("p0", 0.01)
        cluster.load("p1", 100_000)
        cluster.cache_below("p1", num_device, 20 - num_device, 0)
        plan = cluster.plan(Placement.REMOTE)
        assert plan.prefill == cluster.refs["p0"]
        assert plan.scores[0].fetched_tokens == fetched * BLOCK_SIZE


def test_prefill_and_decode_are_chosen_together() -> None:
    """p1 has the prefix, and pushes to d1 ten times faster than to d0, which is a little less loaded."""
    cluster = Cluster("p0", "p1", "d0", "d1")
    cluster.pace("p0", 0.001)
    cluster.cache("p1", 20)
    cluster.load("d1", 32)
    for name in ("p0", "p1"):
        cluster.link(name, "d0", 0.1)
    for name in ("p0", "p1"):
        cluster.link("d0", name, 0.1)
    assert cluster.chosen(Placement.REMOTE) == "p1>d1"
    assert cluster.chosen(Placement.REMOTE, transfer_weight=0.0) == "p1>d0"


def test_a_decode_worker_that_has_the_prefix_needs_less_moved() -> None:
    cluster = Cluster("p0", "d0", "d1")
    cluster.pace("p0", 0.001)
    assert cluster.chosen(Placement.REMOTE) == "p0>d0"
    cluster.cache("d1", 20)
    assert cluster.chosen(Placement.REMOTE) == "p0>d1"


def test_costs_are_in_tokens_of_usual_pace() -> None:
    cluster = Cluster("p0", "d0", gbps=2.0)
    cluster.pace("p0", 0.001)
    cluster.cache("p0", 10)
    cluster.load("p0", 50)
    cluster.load("d0", 64)
    score = cluster.plan(Placement.REMOTE, transfer_weight=0.8, kv_token_cost=0.25).scores[0]
    assert (score.work, score.uncached, score.computed_tokens) == (50.0, NUM_TOKENS - 160, NUM_TOKENS - 160)
    assert score.transfer == pytest.approx(21 * BLOCK_BYTES / 2e9 / 0.001 * 0.8 * FIRST_SHARE)
    assert (score.occupancy, score.affinity) == (16.0, 0.0)
    assert score.total == score.work + score.uncached + score.transfer + score.occupancy
    assert str(score).startswith("p0>d0 ")


def test_a_peer_s_prefix_counts_by_what_its_push_costs() -> None:
    """d0 caches 20 blocks; p0 gets them pushed, unless the path is slower than computing."""
    for gbps, expected in ((10.0, 1), (0.001, NUM_TOKENS)):
        cluster = Cluster("p0", "d0", gbps=gbps)
        cluster.pace("p0", 0.001)
        cluster.cache("d0", 20)
        assert cluster.plan(Placement.REMOTE).scores[0].computed_tokens == expected


def test_an_overloaded_worker_is_not_chosen_for_its_hits() -> None:
    cluster = Cluster("d0", "d1")
    cluster.cache("d1", 20)
    cluster.view.heard(cluster.refs["d1"], WorkerLoad(), GivenWork(1, 1600), 0.0)
    assert cluster.chosen(kv_token_cost=0.01) == "d0"
    assert cluster.chosen(kv_token_cost=0.01, imbalance=100.0) == "d1"


def test_a_worker_that_was_not_heard_of_is_used_only_when_all_were_not() -> None:
    cluster = Cluster("d0", "d1", "d2")
    cluster.cache("d0", 20)
    cluster.load("d1", 3200, now=10.0)
    assert cluster.chosen(now=2.0) == "d0"
    assert cluster.chosen(now=10.0) == "d1"
    cluster.load("d1", 0, now=10.0)
    later = [cluster.chosen(now=100.0) for _ in range(60)]
    assert set(later) == {"d0", "d1", "d2"}  # two at random each time, of whose hits nothing is believed
    cluster.view.assign(cluster.refs["d0"], 6400)
    assert "d0" not in {cluster.chosen(now=100.0) for _ in range(60)}  # the better of two


def test_a_session_stays_where_it_was_as_long_as_that_costs_little() -> None:
    cluster = Cluster(*(f"d{number}" for number in range(8)))
    homes = {session: cluster.chosen(session=session) for session in map(str, range(40))}
    assert len(set(homes.values())) > 4
    assert all(cluster.chosen(session=session) == home for session, home in homes.items())
    cluster.load(homes["0"], 32)
    assert cluster.chosen(session="0") == homes["0"]
    cluster.load(homes["0"], 6400)
    assert cluster.chosen(session="0") != homes["0"]
    cluster.load(homes["0"], 0)
    gone = homes["1"]
    cluster.view.lose(cluster.refs[gone], 0.0)
    moved = {session for session, home in homes.items() if cluster.chosen(session=session) != home}
    assert moved == {session for session, home in homes.items() if home == gone}


def test_a_place_that_fails_is_avoided_while_there_is_another() -> None:
    cluster = Cluster("p0", "d0", "d1")
    cluster.cache("d0", 20)
    assert cluster.chosen(Placement.LOCAL, avoided=frozenset({"d0"})) == "d1"
    assert cluster.chosen(Placement.LOCAL, avoided=frozenset({"d0", "d1", "p0"})) == "d0"
    assert cluster.chosen(Placement.REMOTE, avoided=frozenset({"p0"})).startswith("p0>")


def test_a_prompt_that_its_decode_worker_caches_is_computed_there() -> None:
    cluster = Cluster("p0", "d0")
    assert (cluster.chosen(), cluster.plan().reason) == ("p0>d0", PlanReason.PREFILL_POOL)
    cluster.cache("d0", 20)
    cluster.view.learn_pace(cluster.refs["p0"], 0.0, 0.1, 1000)
    cluster.link("d0", "p0", 1.0)
    cluster.link("p0", "d0", 0.01)
    assert (cluster.chosen(), cluster.plan().reason) == ("d0", PlanReason.PREFIX_ON_DECODE)


def test_prompts_that_queue_are_shared_and_the_reason_says_so() -> None:
    cluster = Cluster("p0", "d0")
    cluster.load("p0", 2 * NUM_TOKENS)
    assert (cluster.chosen(), cluster.plan().reason) == ("d0", PlanReason.PREFILL_POOL_BUSY)
    assert cluster.chosen(local_prefill_cost=4.0) == "p0>d0"


def test_the_largest_costs_that_a_policy_may_name_still_choose_as_they_should() -> None:
    """Larger ones overflow: 0 tokens of work at infinite cost are no number, and no number is less than another."""
    cluster = Cluster("p0", "d0")
    cluster.pace("d0", 1.0)
    for _ in range(50):
        cluster.pace("p0", 1e-6)
    largest = {"local_prefill_cost": MOST, "imbalance": MOST, "affinity_tokens": MOST}
    assert cluster.chosen(**largest) == "p0>d0"
    for score in cluster.plan(**largest, session="s").scores:
        assert math.isfinite(score.total)


def test_without_a_path_the_decode_worker_computes_and_remote_waits() -> None:
    cluster = Cluster("d0")
    assert cluster.plan().reason is PlanReason.NO_PREFILL_WORKER
    ask = Ask(GenerateRequest("r", (1,), SamplingParams(), StopConditions(max_tokens=1)), Placement.REMOTE)
    assert choose(ask, cluster.view, RoutingPolicy(), 2.0, 0.0, cluster.rng) is None


def test_of_many_workers_few_are_looked_at_and_the_choice_is_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    same = 0
    for _ in range(40):
        cluster = Cluster(*(f"{role}{number}" for number in range(30) for role in "pd"))
        cluster.pace("p0", 0.001)
        for name in cluster.refs:
            cluster.load(name, rng.randrange(40) * BLOCK_SIZE)
            if rng.random() < 0.4:
                cluster.cache(name, rng.choice([3, 10, 20]))
        few = cluster.plan(Placement.REMOTE).scores[0].total
        with monkeypatch.context() as patch:
            patch.setattr(candidates, "WIDTH", 1000)
            all_of_them = cluster.plan(Placement.REMOTE).scores[0].total
        assert all_of_them <= few + 1e-6
        assert few <= 1.2 * all_of_them
        same += few == pytest.approx(all_of_them)
    assert same >= 36
