"""A real Prometheus scrapes a router's and a worker's metrics, takes our rules, and answers from both."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
import yaml
from aiohttp import web
from prometheus_client import CollectorRegistry, start_http_server

from cluster.free_ports import free_ports
from router.admission.policy import Band
from router.front.generation import Front
from router.front.openai_http import build_http_app
from telemetry.router_metrics import Outcome, RouterMetrics, RouterState, RouterStateCollector, RoutingMetrics
from telemetry.slo_metrics import SloTargets
from telemetry.worker_metrics import WorkerMetrics
from tests.deploy.chart import CHART
from tests.deploy.serving import serving
from tests.deploy.tools import prometheus_tool
from tests.telemetry.test_metrics import STATE

TIMEOUT_S: Final = 60.0


def router_app() -> web.Application:
    """The router's own front, which answers as it does in production; of the rest of the router it needs nothing."""
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry, "tiny", SloTargets(ttft_s=2.5, itl_s=0.1), tuple(Band))
    metrics.requests.labels("completions", Outcome.OK).inc()
    RoutingMetrics(registry).planned("prefill_pool", 1, 0.0)
    state = RouterState(2, {}, {("decode", "ready"): 3}, 5, 10, 16)
    registry.register(RouterStateCollector(lambda: state, "tiny"))
    front = SimpleNamespace(metrics=metrics, new_request_id=lambda: "r")
    return build_http_app(cast(Front, front), lambda: None)


def worker_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    WorkerMetrics(registry, lambda: replace(STATE, orphaned_blocks=7))
    return registry


class Prometheus:
    """One that runs; asks it over HTTP."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/{path}?{urllib.parse.urlencode(query)}", timeout=5) as answer:
            return json.load(answer)["data"]

    def value(self, query: str) -> float | None:
        """Of the only series that `query` gives; None while there is none."""
        found = self.get("query", query=query)["result"]
        return float(found[0]["value"][1]) if len(found) == 1 else None

    def until(self, query: str, wanted: float) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while (value := self._value_or_none(query)) != wanted:
            assert time.monotonic() < deadline_s, f"{query} is {value}, not {wanted}"
            time.sleep(0.1)

    def _value_or_none(self, query: str) -> float | None:
        try:
            return self.value(query)
        except urllib.error.URLError:  # it is still starting
            return None


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    server, thread = start_http_server(0, "127.0.0.1", worker_registry())
    with serving(router_app) as router_port:
        targets = {"router-0": f"127.0.0.1:{router_port}", "decode-0": f"127.0.0.1:{server.server_port}"}
        try:
            with running_prometheus(tmp_path, targets) as port:
                yield Prometheus(port)
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


@contextmanager
def running_prometheus(folder: Path, addresses: Mapping[str, str]) -> Iterator[int]:
    """A Prometheus that scrapes host:port of each pod, labelled as a PodMonitor would; gives its own port."""
    targets = [
        {"targets": [address], "labels": {"namespace": "prod", "pod": pod}} for pod, address in addresses.items()
    ]
    settings = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(CHART / "observability" / "rules.yaml")],
        "scrape_configs": [{"job_name": "tandem", "static_configs": targets}],
    }
    file, port = folder / "prometheus.yaml", free_ports(1)[0]
    file.write_text(yaml.safe_dump(settings))
    command = [prometheus_tool("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield port
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def test_prometheus_reads_every_target_and_takes_the_rules(prometheus: Prometheus) -> None:
    prometheus.until("sum(up)", 2)
    prometheus.until('sum(tandem_router_workers{role="decode", life="ready", namespace="prod"})', 3)
    prometheus.until('tandem_worker_orphaned_blocks{pod="decode-0"}', 7)
    prometheus.until("vllm:kv_cache_usage_perc", 0.5)
    targets = prometheus.get("targets", state="active")["activeTargets"]
    assert [target["health"] for target in targets] == ["up", "up"], targets
    groups = prometheus.get("rules")["groups"]
    assert {group["name"] for group in groups} == {"tandem-recording", "tandem-alerts"}
    assert [rule for group in groups for rule in group["rules"] if rule["health"] == "err"] == []
