"""Two tenants on one simulated cluster: one that sends ten times its share moves the other's first tokens by little."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable
from dataclasses import replace

import pytest

from core.errors import Rejected, RejectReason
from core.request import GenerateRequest, SamplingParams, StopConditions
from router.admission.admission import Admission, band_of
from router.admission.fair_line import FairLine, Waiting
from router.admission.forecast import AfterTurn, Arrivals
from tests.simulation.cluster_world import DISPATCH, NO_FAULTS, World
from tests.simulation.world_client import Client

SEEDS = (1, 2, 3)
LOAD_S = 60.0
REST_S = 50.0  # the longest wait in the queue, and then some
CAPACITY = 7.4  # requests a second that the cluster serves
OTHER, VICTIM = "other", "victim"
RATE = 2.0  # of the victim, in a second; the other one's share is what that leaves


def load(
    seed: int, rates: dict[str, float], load_s: float = LOAD_S, rest_s: float = REST_S, num_routers: int = 1
) -> dict[str, list[Client]]:
    """The clients of each tenant, whose requests come at random, `rates` of them in a second."""
    dispatch = replace(DISPATCH, max_open_requests=4096)
    world = World(seed, NO_FAULTS, num_routers=num_routers, dispatch=dispatch)
    clients: dict[str, list[Client]] = {tenant: [] for tenant in rates}

    def ask(tenant: str, number: int, rng: random.Random) -> None:
        prompt = tuple(rng.randrange(1000) for _ in range(rng.randrange(15, 25)))
        stop = StopConditions(max_tokens=rng.randrange(4, 9))
        request = GenerateRequest(f"{tenant}{number}", prompt, SamplingParams(0.0), stop, tenant=tenant)
        router = 0 if tenant == VICTIM else number % num_routers
        clients[tenant].append(world.ask(world.routers[router], request))

    for tenant, rate in rates.items():
        rng, at_s, number = random.Random(f"{seed} {tenant}"), 2.0, 0  # the same whatever the others do
        while (at_s := at_s + rng.expovariate(rate)) < load_s:
            number += 1
            world.at(at_s, lambda tenant=tenant, number=number, rng=rng: ask(tenant, number, rng))  # type: ignore[misc]
    world.run_until(load_s + rest_s)
    world.check_over()
    return clients


def ask_two_routers(times_the_share: float, seeds: Iterable[int] = SEEDS[:2]) -> list[Client]:
    """The victim's requests, which all come to one router, the other tenant's to either."""
    rates = {VICTIM: RATE, OTHER: times_the_share * (CAPACITY - RATE)}
    return of(VICTIM, [load(seed, rates, load_s=20.0, num_routers=2) for seed in seeds])


def ttfts_s(clients: Iterable[Client]) -> list[float]:
    return [client.first_s - client.submitted_s for client in clients if client.error is None]


def loads(times_the_share: float) -> list[dict[str, list[Client]]]:
    rates = {VICTIM: RATE, OTHER: times_the_share * (CAPACITY - RATE)}
    return [load(seed, rates) for seed in SEEDS]


def p95_s(clients: Iterable[Client]) -> float:
    return statistics.quantiles(ttfts_s(clients), n=20)[-1]


def of(tenant: str, runs: list[dict[str, list[Client]]]) -> list[Client]:
    return [client for clients in runs for client in clients[tenant]]


def num_served(runs: list[dict[str, list[Client]]]) -> int:
    return sum(client.finished and client.last_s < LOAD_S for client in of(VICTIM, runs) + of(OTHER, runs))


@pytest.fixture(scope="module")
def before() -> list[dict[str, list[Client]]]:
    return loads(1.0)


def test_a_tenant_that_sends_ten_times_its_share_moves_the_others_p95_by_less_than_a_fifth(
    before: list[dict[str, list[Client]]],
) -> None:
    after = loads(10.0)
    assert all(client.finished for client in of(VICTIM, before) + of(VICTIM, after))
    assert p95_s(of(VICTIM, after)) < 1.2 * p95_s(of(VICTIM, before))  # 1.82 s and 1.70 s
    reasons = {client.error.reason for client in of(OTHER, after) if isinstance(client.error, Rejected)}
    assert reasons == {RejectReason.QUEUE_TIMEOUT, RejectReason.QUEUE_FULL, RejectReason.SHED}
    assert all(client.over for client in of(OTHER, after))
    assert num_served(after) > 0.98 * num_served(before)  # and no worker waits for the router


def ratios_to_prediction(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Median time to the first token, by what was predicted of it when it came; by tenant, under an overload."""
    predicted_s: dict[str, float] = {}
    enter = Admission.enter

    def note(self: Admission, request: GenerateRequest, now: float, max_ttft_s: float | None = None):  # type: ignore[no-untyped-def]
        item = Waiting(request.request_id, request.tenant, band_of(request), self.expected.of(request), now)
        predicted_s[request.request_id] = self._predict_ttft_s(item, request.num_prompt_tokens, now) or 0.0
        return enter(self, request, now, max_ttft_s)

    with monkeypatch.context() as patched:
        patched.setattr(Admission, "enter", note)
        clients = load(SEEDS[0], {VICTIM: RATE, OTHER: 1.5 * (CAPACITY - RATE)})
    return {
        tenant: statistics.median(
            (client.first_s - client.submitted_s) / predicted_s[client.request.request_id]
            for client in clients[tenant]
            if client.finished and client.submitted_s > 10.0
        )
        for tenant in clients
    }


def test_first_tokens_come_when_they_were_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = ratios_to_prediction(monkeypatch)
    assert all(0.85 < ratio < 1.15 for ratio in ratios.values()), ratios


@pytest.mark.parametrize(
    ("owner", "name", "planted", "late"),
    [
        (AfterTurn, "first_token", lambda *_: None, VICTIM),
        (Arrivals, "tokens_per_s", lambda *_: {}, OTHER),
    ],
    ids=["without what follows the turn", "without what others bring"],
)
def test_else_they_come_later(
    owner: type, name: str, planted: object, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: one that hardly waits, and one that waits long."""
    monkeypatch.setattr(owner, name, planted)
    assert ratios_to_prediction(monkeypatch)[late] > 1.15


def pop_in_order_of_arrival(self: FairLine) -> Waiting:
    item = min((tenant.head for tenant in self._tenants.values()), key=lambda head: head.arrived_s)
    self.remove(item)
    return item


def send_all_at_once(self: Admission, now: float) -> str | None:
    return self.line.pop(now).request_id if self.line else None


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [(FairLine, "pop", pop_in_order_of_arrival), (Admission, "next", send_all_at_once)],
    ids=["first come, first served", "no bound at the workers"],
)
def test_without_turns_or_without_a_bound_it_would(
    owner: type,
    name: str,
    planted: object,
    before: list[dict[str, list[Client]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control: these are the two bugs that the test above must find."""
    monkeypatch.setattr(owner, name, planted)
    clients = load(SEEDS[0], {VICTIM: RATE, OTHER: 10 * (CAPACITY - RATE)}, load_s=30.0, rest_s=80.0)
    assert p95_s(clients[VICTIM]) > 3 * p95_s(of(VICTIM, before))


def test_one_that_sends_to_two_routers_pays_at_each_for_what_it_got_at_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, after = (ask_two_routers(times) for times in (1.0, 10.0))
    assert all(client.finished for client in before + after)
    assert p95_s(after) < 1.4 * p95_s(before)  # 2.3 s and 1.9 s: each router has its own prompts out
    monkeypatch.setattr(FairLine, "charge", lambda *_: None)  # 7.2 s
    assert p95_s(ask_two_routers(10.0, SEEDS[:1])) > 2 * p95_s(after)
