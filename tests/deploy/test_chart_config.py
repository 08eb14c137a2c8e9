"""What the chart tells router and controller is a ClusterConfig: a field that is renamed there is found here."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from cluster.config import ClusterConfig
from cluster.settings import load_cluster_config
from router.policy_file import parse_policy
from tests.deploy.chart import cases, of_kind, render

CASES: Final = cases()
# The URL comes by TANDEM_REDIS_URL and the Ray by a flag; a pod has its cores; faults are for tests; routers are pods.
LEFT_OUT: Final = {"redis_url", "ray_address", "pin_workers", "kv_faults", "num_routers"}


def config_of(objects: list[dict[str, Any]], folder: Path) -> ClusterConfig:
    (text,) = [item["data"]["config.yaml"] for item in of_kind(objects, "ConfigMap") if "config.yaml" in item["data"]]
    file = folder / "config.yaml"
    file.write_text(text)
    return load_cluster_config(file, {}, folder)


@pytest.mark.parametrize("case", CASES)
def test_the_rendered_config_is_a_cluster_config(case: str, tmp_path: Path) -> None:
    values = CASES[case]
    config = config_of(render(values), tmp_path)
    assert config.aggregated == (case.startswith("aggregated"))
    assert config.drain_timeout_s == values.get("config", {}).get("drain_timeout_s", 60)


def test_every_field_is_a_value_or_worked_out_by_the_chart() -> None:
    keys: set[str] = set()
    for values in CASES.values():
        (text,) = [
            item["data"]["config.yaml"]
            for item in of_kind(render(values), "ConfigMap")
            if "config.yaml" in item["data"]
        ]
        keys |= set(yaml.safe_load(text))
    assert {item.name for item in fields(ClusterConfig)} - keys == LEFT_OUT


def test_large_numbers_stay_whole_numbers(tmp_path: Path) -> None:
    """Helm reads numbers as floats: 2097152 must not become 2.097152e+06."""
    assert config_of(render({"config": {"num_blocks": 2097152}}), tmp_path).num_blocks == 2097152


def test_bytes_may_have_a_unit(tmp_path: Path) -> None:
    config = config_of(render({"config": {"host_cache_bytes": "2GiB", "disk_cache_bytes": "1.5TB"}}), tmp_path)
    assert (config.host_cache_bytes, config.disk_cache_bytes) == (1 << 31, 15 * 10**11)
    assert config.disk_cache_folder == Path("/cache")


def test_the_policy_is_one_and_a_change_of_it_restarts_nothing() -> None:
    tenants = {"acme": {"keys_sha256": ["ab" * 32], "weight": 2}}
    values = {"router": {"policy": {"admission": {"tenants": tenants}}}}
    (config,) = [item for item in of_kind(render(values), "ConfigMap") if "policy.yaml" in item["data"]]
    policy = parse_policy(config["data"]["policy.yaml"])
    assert policy.admission.tenant("acme").weight == 2
    deployments = [of_kind(render(each), "Deployment") for each in (values, {})]
    assert deployments[0] == deployments[1] != of_kind(render({"config": {"num_blocks": 7}}), "Deployment")


def test_a_wanted_worker_has_a_pod(tmp_path: Path) -> None:
    values = {"prefill": {"replicas": 3}, "decode": {"replicas": 2}}
    config = config_of(render(values), tmp_path)
    assert (config.num_prefill, config.num_decode) == (3, 2)
    scaled = config_of(render(CASES["scaled"]), tmp_path)
    assert (scaled.num_prefill, scaled.num_decode) == (4, 4)  # as many as there may be pods
