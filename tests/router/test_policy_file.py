"""The operator's file: strict, by path; read again when it changes, and never worse than before."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from core.errors import BadRequest
from router.policy.routing_policy import RoutingPolicy
from router.policy_file import Policy, follow_policy, parse_policy, read_policy
from telemetry.router_metrics import PolicyMetrics

KEY = "ab" * 32
WHOLE = f"""
admission:
  tenants:
    acme: {{keys_sha256: ["{KEY}"], weight: 2, max_concurrent: 8, tokens_per_s: 100, burst_tokens: 5000, batch: true,
            max_output_tokens: 64}}
  anonymous: {{weight: 0.5}}
  queue:
    max_waiting: 10
    interactive: {{max_wait_s: 5, max_ttft_s: 2.5}}
    batch: {{max_wait_s: 600}}
    batch_ageing_s: 7
    tokens_ahead: 256
  degrade: {{max_output_tokens: 100, everything_batch: true}}
"""


def test_every_key_is_read() -> None:
    admission = parse_policy(WHOLE).admission
    acme = admission.tenant("acme")
    assert (acme.weight, acme.bucket_tokens, acme.batch) == (2.0, 5000.0, True)
    assert admission.tenant("").weight == 0.5
    assert admission.queue.interactive.max_ttft_s == 2.5
    assert admission.degrade.everything_batch
    assert parse_policy("{}") == Policy() == parse_policy("admission: {}")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("admision: {}", "admision"),
        ("admission: {tenants: {acme: {wieght: 1}}}", "admission.tenants.acme.wieght"),
        ("admission: {tenants: {acme: {weight: '1'}}}", "admission.tenants.acme.weight"),
        ("admission: {tenants: {acme: {weight: -1}}}", "admission.tenants.acme.weight"),
        ("admission: {tenants: {acme: {weight: .nan}}}", "admission.tenants.acme.weight"),
        ("admission: {tenants: {acme: {keys_sha256: [secret]}}}", "admission.tenants.acme.keys_sha256.0"),
        ("admission: {tenants: {acme: {burst_tokens: 5}}}", "admission.tenants.acme"),
        ("admission: {tenants: {'a b': {}}}", "admission.tenants.a b"),
        (f"admission: {{anonymous: {{keys_sha256: [{KEY}]}}}}", "admission"),
        (f"admission: {{tenants: {{a: {{keys_sha256: [{KEY}]}}, b: {{keys_sha256: [{KEY}]}}}}}}", "admission"),
        ("admission: {queue: {max_waiting: 0}}", "admission.queue.max_waiting"),
        ("admission: {degrade: {smaller_model: tiny}}", "admission.degrade.smaller_model"),
        ("admission: {queue: {}, queue: {}}", "policy"),
        ("[]", "policy"),
        ("admission: [", "policy"),
        ("", "policy"),
        ("# was: keys\n---\n", "policy"),
        ("admission: {tenants: {acme: &gold {weight: 2}, other: *gold}}", "policy"),
        ("admission: &admission {tenants: *admission}", "policy"),
        *(
            (f"admission: {{tenants: {{acme: {{{name}: {value}}}}}}}", f"admission.tenants.acme.{name}")
            for name in ("max_concurrent", "tokens_per_s", "max_output_tokens")
            for value in ("0", "-1", "1.0e-300", "1.0e+300", "1" + 400 * "0")
        ),
    ],
)
def test_what_is_wrong_is_named_by_its_path(text: str, path: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_policy(text)
    assert caught.value.field == path


def test_a_tag_that_does_not_fit_its_value_is_refused_and_ends_nothing() -> None:
    tags = ("int", "float", "bool", "null", "timestamp", "binary", "str", "seq", "map", "set", "omap", "pairs")
    values = ('""', "x", "[]", "[a]", "{}", "{a: b}", "-", "0x", "1:", "99999-99-99", "~")
    for tag, value in itertools.product(tags, values):
        for text in (f"!!{tag} {value}", f"routing: {{imbalance: !!{tag} {value}}}", f"!!{tag} {value} : 1"):
            with suppress(BadRequest):
                parse_policy(text)
    assert parse_policy("routing: {imbalance: !!float 2}").routing.imbalance == 2.0


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot be read"):
        read_policy(tmp_path / "none.yaml")


async def until(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not within 5 s")


async def test_a_changed_file_holds_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    file, registry, applied = tmp_path / "policy.yaml", CollectorRegistry(), []

    def count(outcome: str) -> float | None:
        return registry.get_sample_value("tandem_policy_reads_total", {"outcome": outcome})

    def weight() -> float:
        return applied[-1].admission.tenant("t").weight

    file.write_text("admission: {tenants: {t: {weight: 2}}}")
    following = asyncio.create_task(follow_policy(file, applied.append, PolicyMetrics(registry), interval_s=0.005))
    await until(lambda: count("applied") == 1)
    file.write_text("admission: {tenants: {t: {weight: heavy}}}")
    await until(lambda: count("refused") == 1)
    file.unlink()
    await until(lambda: count("refused") == 2)
    assert weight() == 2
    file.write_text("admission: {tenants: {t: {weight: 3}}}")
    await until(lambda: count("applied") == 2)
    assert weight() == 3
    assert len(applied) == 2 and not following.done()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


@pytest.mark.parametrize("name", sorted(RoutingPolicy.model_fields.keys() - {"hedge"}))
def test_a_wrong_routing_value_is_refused_by_its_path(name: str) -> None:
    assert getattr(parse_policy(f"routing: {{{name}: 1.0}}").routing, name) == 1.0
    for wrong in ("-1.0", ".nan", ".inf", "cheap"):
        with pytest.raises(BadRequest, match=f"routing.{name}"):
            parse_policy(f"routing: {{{name}: {wrong}}}")
