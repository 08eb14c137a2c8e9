"""Tenants on a real cluster: who sends much waits for its own; wrong keys; the policy file read while it serves.

By order, not by time: what was computed before the other tenant's first token. The p95 under ten times the share is
held on virtual time, in tests/simulation/test_fairness_world.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import urllib.error
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.acceptance.conftest import SharedClusters
from tests.acceptance.golden import CASES
from tests.acceptance.running_cluster import RunningCluster, wait_until

PROSE = next(case for case in CASES if case.name == "prose_1500")
PROMPT_TOKENS = 300
NUM_NOISY = 16
TOKENS_AHEAD = 256
ALLOWED = 2 * (TOKENS_AHEAD // PROMPT_TOKENS + 1) + 2 * 2 + 2  # out at two workers, then turns


def key(tenant: str) -> str:
    return f"sk-{tenant}"


def policy(*tenants: str, **rest: Any) -> dict[str, Any]:
    digests = {name: {"keys_sha256": [hashlib.sha256(key(name).encode()).hexdigest()]} for name in tenants}
    return {"admission": {"tenants": digests, **rest}}


@pytest.fixture(scope="module")
def policed(clusters: SharedClusters) -> Iterator[None]:
    """`pair` knows two tenants, and nobody else: once for all tests, as the file is looked at once a second."""
    pair = clusters.use("pair")
    pair.policy.write_text(json.dumps(policy("noisy", "quiet", queue={"tokens_ahead": TOKENS_AHEAD})))
    wait_until(lambda: status_of(pair, {}) == 401, 10.0)
    yield
    pair.policy.write_text("{}")
    wait_until(lambda: status_of(pair, {}) == 200, 10.0)


@pytest.fixture
def tenants(policed: None, pair: RunningCluster) -> Iterator[RunningCluster]:
    yield pair
    pair.wait_idle()


def status_of(cluster: RunningCluster, headers: dict[str, str]) -> int:
    try:
        cluster.complete([1, 2, 3], headers=headers, max_tokens=1)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    return 200


async def first_token(session: aiohttp.ClientSession, cluster: RunningCluster, tenant: str, number: int) -> None:
    """Returns when the first token of a prompt that nobody has cached is here."""
    body = {"model": cluster.model, "prompt": [number + 20, *PROSE.prompt_ids[:PROMPT_TOKENS]], "max_tokens": 1}
    headers = {"Authorization": f"Bearer {key(tenant)}"}
    async with session.post(f"{cluster.http}/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        await response.read()


async def test_who_sends_much_waits_for_its_own(tenants: RunningCluster) -> None:
    order: list[str] = []

    async def ask(session: aiohttp.ClientSession, tenant: str, number: int) -> None:
        await first_token(session, tenants, tenant, number)
        order.append(tenant)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        noisy = [asyncio.create_task(ask(session, "noisy", number)) for number in range(NUM_NOISY)]
        await asyncio.to_thread(wait_until, lambda: tenants.status().open_requests == NUM_NOISY, 30.0)
        before = len(order)
        await ask(session, "quiet", NUM_NOISY)
        passed_by = len(order) - 1 - before
        await asyncio.gather(*noisy)
    assert passed_by <= ALLOWED < NUM_NOISY - before, order


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer sk-nobody"}, 401),
        ({"Authorization": f"Bearer {key('quiet')}"}, 200),
    ],
)
def test_only_a_known_key_is_served(tenants: RunningCluster, headers: dict[str, str], status: int) -> None:
    assert status_of(tenants, headers) == status


def test_tenants_share_no_prefix(tenants: RunningCluster) -> None:
    prompt = [7, *PROSE.prompt_ids[:100]]

    def cached(tenant: str) -> int:
        headers = {"Authorization": f"Bearer {key(tenant)}"}
        answer = tenants.complete(prompt, headers=headers, max_tokens=1, tandem={"prefill": "local"})
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("noisy") == 0
    assert cached("noisy") > 0  # the control
    assert cached("quiet") == 0


def test_a_bad_policy_changes_nothing(tenants: RunningCluster) -> None:
    """Last here: it stays in the file."""

    def refused() -> bool:
        return 'tandem_policy_reads_total{outcome="refused"} 0.0' not in tenants.metrics()

    assert not refused()
    tenants.policy.write_text("admission: {tenants: {quiet: {wieght: 1}}}")
    wait_until(refused, 10.0)
    assert status_of(tenants, {"Authorization": f"Bearer {key('quiet')}"}) == 200
    assert status_of(tenants, {}) == 401
