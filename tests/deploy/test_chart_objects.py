"""What no schema sees: selectors find pods, ports exist, amounts parse, nothing runs as root, the drain fits.

Each rule is a function of the rendered objects that yields what is wrong; it is run over every case, and once over
objects with the fault planted.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import yaml

from cluster.main import _parser
from tests.deploy.chart import DEFAULTS, Pod, cases, merged, of_kind, pods, render, selects

CASES: Final = cases()
Objects = list[dict[str, Any]]
Rule = Callable[[Objects], Iterator[str]]

QUANTITY: Final = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?")


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Every (key, value) below `value`."""
    pairs = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    for key, item in pairs:
        if key is not None:
            yield key, item
        if isinstance(item, dict | list):
            yield from walk(item)


def config_of(objects: Objects) -> dict[str, Any]:
    (text,) = [item["data"]["config.yaml"] for item in of_kind(objects, "ConfigMap") if "config.yaml" in item["data"]]
    config: dict[str, Any] = yaml.safe_load(text)
    return config


def selectors_find_pods(objects: Objects) -> Iterator[str]:
    """Of Services, budgets, policies, monitors and the pool; and those of the owners find their own pods alone."""
    every = list(pods(objects))
    for item in objects:
        kind, spec, name = item["kind"], item.get("spec", {}), item["metadata"]["name"]
        if kind in ("Deployment", "StatefulSet"):
            found = [pod.name for pod in every if selects(spec["selector"], pod.labels)]
            if found != [name]:
                yield f"{kind} {name} selects {found}"
            continue
        selector = {
            "Service": lambda spec: {"matchLabels": spec["selector"]},
            "NetworkPolicy": lambda spec: spec["podSelector"],
            "PodDisruptionBudget": lambda spec: spec["selector"],
            "PodMonitor": lambda spec: spec["selector"],
            "InferencePool": lambda spec: spec["selector"],
        }.get(kind)
        for_elsewhere = kind == "NetworkPolicy" and name.endswith("-redis")  # an external Redis leaves it without pods
        if selector and not for_elsewhere and not any(selects(selector(spec), pod.labels) for pod in every):
            yield f"{kind} {name} selects no pod"
    for monitor in of_kind(objects, "ServiceMonitor"):
        services = [item["metadata"]["labels"] for item in of_kind(objects, "Service")]
        if not any(selects(monitor["spec"]["selector"], labels) for labels in services):
            yield f"ServiceMonitor {monitor['metadata']['name']} selects no Service"
    for scaler in [*of_kind(objects, "HorizontalPodAutoscaler"), *of_kind(objects, "ScaledObject")]:
        target = scaler["spec"]["scaleTargetRef"]
        if not any(item["metadata"]["name"] == target["name"] for item in of_kind(objects, target["kind"])):
            yield f"{scaler['kind']} {scaler['metadata']['name']} scales nothing"


def ports_exist(objects: Objects) -> Iterator[str]:
    """Every target port, probe port, policy port and monitor port is a port of a pod that it is about."""
    every = list(pods(objects))
    for service in of_kind(objects, "Service"):
        chosen = [pod for pod in every if selects({"matchLabels": service["spec"]["selector"]}, pod.labels)]
        for port in service["spec"]["ports"]:
            if not chosen or any(port["targetPort"] not in pod.ports for pod in chosen):
                yield f"Service {service['metadata']['name']}: no port {port['targetPort']}"
    for pod in every:
        numbers = list(pod.ports.values())
        if len(set(numbers)) != len(numbers):
            yield f"{pod.name}: a port twice: {numbers}"
        for container in pod.containers:
            names = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            for key, probe in walk(container):
                if key in ("grpc", "httpGet", "tcpSocket") and not {probe["port"]} & {*names, *names.values()}:
                    yield f"{pod.name}: a probe of port {probe['port']}"
    for policy in of_kind(objects, "NetworkPolicy"):
        chosen = [pod for pod in every if selects(policy["spec"]["podSelector"], pod.labels)]
        for rule in policy["spec"].get("ingress", []):
            for port in rule.get("ports", []):
                if chosen and not any(port["port"] in pod.ports for pod in chosen):
                    yield f"NetworkPolicy {policy['metadata']['name']}: no port {port['port']}"
    for monitor in of_kind(objects, "PodMonitor"):
        chosen = [pod for pod in every if selects(monitor["spec"]["selector"], pod.labels)]
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if any(endpoint["port"] not in pod.ports for pod in chosen):
                yield f"PodMonitor: no port {endpoint['port']}"
    for monitor in of_kind(objects, "ServiceMonitor"):
        names = {port["name"] for service in of_kind(objects, "Service") for port in service["spec"]["ports"]}
        for endpoint in monitor["spec"]["endpoints"]:
            if endpoint["port"] not in names:
                yield f"ServiceMonitor: no port {endpoint['port']}"


# What a process listens on by the rendered config: the component that does, the name of its port.
LISTENING: Final = {
    "http_port": (("router",), "http"),
    "grpc_port": (("router",), "grpc"),
    "registry_port": (("router",), "registry"),
    "controller_port": (("head",), "controller"),
    "controller_health_port": (("head",), "health"),
    "metrics_port": (("prefill", "decode"), "metrics"),
}


def configured_ports_are_the_pods(objects: Objects) -> Iterator[str]:
    """Services and policies go by a port's name; the process listens on a number of the config, a pool calls one."""
    config = config_of(objects)
    for pod in pods(objects):
        for field, (components, name) in LISTENING.items():
            if pod.component in components and pod.ports.get(name) != config[field]:
                yield f"{pod.name}: port {name} is not {field}, {config[field]}"
        for pool in of_kind(objects, "InferencePool"):
            called = {port["number"] for port in pool["spec"]["targetPorts"]}
            if selects(pool["spec"]["selector"], pod.labels) and called != {pod.ports.get("http")}:
                yield f"InferencePool calls {called} of {pod.name}"


def amounts_parse(objects: Objects) -> Iterator[str]:
    for pod in pods(objects):
        for key, value in walk(pod.spec):
            amounts = [*value.values()] if key in ("requests", "limits") else [value] if key == "sizeLimit" else []
            yield from (f"{pod.name}: {key} {amount}" for amount in amounts if not QUANTITY.fullmatch(str(amount)))
        for container in pod.containers:
            if "memory" not in container["resources"]["limits"]:
                yield f"{pod.name}/{container['name']}: no memory limit"


def enums_are_known(objects: Objects) -> Iterator[str]:
    known = {
        "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
        "medium": {"Memory"},
        "podManagementPolicy": {"Parallel"},
        "dnsPolicy": {"ClusterFirstWithHostNet"},
        "fsGroupChangePolicy": {"OnRootMismatch"},
        "protocol": {"TCP"},
        "effect": {"NoSchedule", "PreferNoSchedule", "NoExecute"},
        "appProtocol": {"http", "kubernetes.io/h2c", "grpc"},
        "whenUnsatisfiable": {"DoNotSchedule", "ScheduleAnyway"},
    }
    for key, value in walk(objects):
        if key in known and value not in known[key]:
            yield f"{key}: {value}"


def pods_are_restricted(objects: Objects) -> Iterator[str]:
    """Pod Security `restricted`, and what it does not ask for: no token, no writable root, no host's files."""
    for pod in pods(objects):
        spec, security = pod.spec, pod.spec["securityContext"]
        if security.get("runAsNonRoot") is not True or not security.get("runAsUser", 0):
            yield f"{pod.name}: may run as root"
        if security.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{pod.name}: seccomp"
        if spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.name}: gets a token"
        if any(spec.get(name) for name in ("hostPID", "hostIPC")) or any(
            "hostPath" in item for item in spec["volumes"]
        ):
            yield f"{pod.name}: uses the host"
        for container in pod.containers:
            own = container["securityContext"]
            if own.get("runAsUser", 1) == 0 or own.get("privileged") or own["allowPrivilegeEscalation"]:
                yield f"{pod.name}/{container['name']}: privileges"
            if own["capabilities"]["drop"] != ["ALL"] or not own["readOnlyRootFilesystem"]:
                yield f"{pod.name}/{container['name']}: capabilities or root filesystem"


def rdma_alone_needs_more(objects: Objects) -> Iterator[str]:
    for pod in pods(objects):
        added = [
            cap for container in pod.containers for cap in container["securityContext"]["capabilities"].get("add", [])
        ]
        if added or pod.spec.get("hostNetwork"):
            yield f"{pod.name}: {added}"


def no_role_and_no_wildcard(objects: Objects) -> Iterator[str]:
    for item in objects:
        if item["kind"].endswith(("Role", "RoleBinding")):
            yield f"{item['kind']} {item['metadata']['name']}"
        if item["kind"] == "NetworkPolicy" and {} in item["spec"].get("ingress", []):
            yield f"NetworkPolicy {item['metadata']['name']} opens everything"


def pause_s(container: dict[str, Any]) -> float:
    """How long preStop takes at most; a worker's may end sooner, when nothing is left to it."""
    hook = container["lifecycle"]["preStop"]
    return float(hook["sleep"]["seconds"]) if "sleep" in hook else leaving(hook["exec"]["command"]).within


def leaving(command: list[str]) -> argparse.Namespace:
    """What the preStop hook of a worker says to our own parser."""
    assert command[0] == "tandem"
    return _parser().parse_args(command[1:])


def drains_fit(objects: Objects) -> Iterator[str]:
    """Router and controller get their drain bound before they are killed; all others live until that is over."""
    drain_s = config_of(objects)["drain_timeout_s"]
    everyone = [(pod, container) for pod in pods(objects) for container in pod.spec["containers"]]
    drained_s = max(pause_s(item) for _, item in everyone if item["name"] in ("router", "controller")) + drain_s
    for pod, container in everyone:
        name, left_s = container["name"], pod.spec["terminationGracePeriodSeconds"] - pause_s(container)
        if name in ("router", "controller") and left_s < drain_s + 10:  # the controller closes workers for 2 x 5 s more
            yield f"{pod.name}/{name}: {left_s} s for a drain of {drain_s} s"
        if name not in ("router", "controller") and (pause_s(container) < drained_s or left_s < 10):
            yield f"{pod.name}/{name} ends before the drain"


def leaving_workers_ask_who_is_there(objects: Objects) -> Iterator[str]:
    """By Services that exist, with their ports; and, when all ends, only after the controller has heard of it."""
    ports = {
        f"{item['metadata']['name']}.{item['metadata']['namespace']}.svc:{port['port']}"
        for item in of_kind(objects, "Service")
        for port in item["spec"]["ports"]
    }
    everyone = {item["name"]: item for pod in pods(objects) for item in pod.spec["containers"]}
    hooks = [(pod, item["lifecycle"]["preStop"]) for pod in pods(objects) for item in pod.spec["containers"]]
    workers = [(pod, hook) for pod, hook in hooks if pod.component in ("prefill", "decode")]
    for pod, hook in workers:
        if "exec" not in hook:
            yield f"{pod.name} does not drain"
            continue
        asked = leaving(hook["exec"]["command"])
        if not {asked.registry, asked.controller} <= ports:
            yield f"{pod.name} asks {asked.registry} and {asked.controller}"
        if asked.after <= pause_s(everyone["controller"]):
            yield f"{pod.name} drains before the controller says that all do"


def volumes_are_mounted(objects: Objects) -> Iterator[str]:
    for pod in pods(objects):
        claims = [item["metadata"]["name"] for item in pod.owner["spec"].get("volumeClaimTemplates", [])]
        have = {item["name"] for item in pod.spec.get("volumes", [])} | set(claims)
        used = {mount["name"] for container in pod.containers for mount in container["volumeMounts"]}
        if have != used:
            yield f"{pod.name}: volumes {have ^ used}"
        for container in pod.containers:
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            names = [item["name"] for item in container.get("env", [])]
            if len(set(paths)) != len(paths) or len(set(names)) != len(names):
                yield f"{pod.name}/{container['name']}: something twice"
            if container["name"] in ("ray-head", "ray-worker") and "/dev/shm" not in paths:
                yield f"{pod.name}: the runtime's /dev/shm of 64 MiB"


def valkeys_of_the_right_kind(objects: Objects) -> Iterator[str]:
    for pod in pods(objects):
        if pod.component in ("redis", "gcs"):
            arguments = pod.spec["containers"][0]["args"]
            policy = arguments[arguments.index("--maxmemory-policy") + 1]
            if policy != {"redis": "allkeys-lru", "gcs": "noeviction"}[pod.component]:
                yield f"{pod.name}: {policy}"


def valkey_pod_has_no_volumes_list(objects: Objects) -> Objects:
    """Valkey's only volume is its claim."""
    for pod in pods(objects):
        pod.spec.setdefault("volumes", [])
    return objects


RULES: Final[list[Rule]] = [
    selectors_find_pods,
    ports_exist,
    configured_ports_are_the_pods,
    amounts_parse,
    enums_are_known,
    pods_are_restricted,
    no_role_and_no_wildcard,
    drains_fit,
    leaving_workers_ask_who_is_there,
    volumes_are_mounted,
    valkeys_of_the_right_kind,
]


@pytest.fixture(scope="module")
def rendered() -> dict[str, Objects]:
    return {name: valkey_pod_has_no_volumes_list(render(values)) for name, values in CASES.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule, case: str, rendered: dict[str, Objects]) -> None:
    assert list(rule(rendered[case])) == []


@pytest.mark.parametrize("case", CASES)
def test_only_the_rdma_values_leave_restricted(case: str, rendered: dict[str, Objects]) -> None:
    wide = set(rdma_alone_needs_more(rendered[case]))
    assert bool(wide) == case.startswith("values-rdma")
    assert not any("router" in name or "head" in name for name in wide)


@pytest.mark.parametrize("mode", ["", "-other-mode"], ids=["operator", "plain"])
@pytest.mark.parametrize("case", ["values-rdma", "values-nvlink-node", "values-heterogeneous"])
def test_each_pool_of_workers_is_where_and_how_its_values_say(
    case: str, mode: str, rendered: dict[str, Objects]
) -> None:
    values, objects = merged(DEFAULTS, CASES[case]), rendered[case + mode]
    groups = {}
    for cluster in of_kind(objects, "RayCluster"):
        groups = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    for role in ("prefill", "decode"):
        pool, pod = values[role], of_component(objects, role)
        (container,) = pod.spec["containers"]
        assert container["resources"] == pool["resources"]
        assert pod.spec.get("nodeSelector", {}) == pool["nodeSelector"]
        assert pod.spec.get("tolerations", []) == pool["tolerations"]
        assert bool(pod.spec.get("affinity")) == bool(pool["affinity"])
        assert bool(pod.spec.get("topologySpreadConstraints")) == bool(pool["topologySpreadConstraints"])
        assert (pod.spec.get("hostNetwork", False), pod.spec.get("runtimeClassName", "")) == (
            pool["hostNetwork"],
            pool["runtimeClassName"],
        )
        assert container["securityContext"]["capabilities"].get("add", []) == ["IPC_LOCK"] * pool["ipcLock"]
        (shm,) = [item["emptyDir"] for item in pod.spec["volumes"] if item["name"] == "shm"]
        assert shm == {"medium": "Memory", "sizeLimit": pool["shmSize"]}
        env = {item["name"]: item["value"] for item in container["env"] if "value" in item}
        assert {item["name"]: item["value"] for item in pool["env"]}.items() <= env.items()
        labels = ",".join(f"{key}={value}" for key, value in pool["rayLabels"].items())
        if groups:
            assert groups[role]["replicas"] == pool["replicas"]
            assert groups[role]["resources"] == {f"tandem_{role}": "1"}
            assert groups[role].get("labels", {}) == pool["rayLabels"]
        else:
            assert pod.owner["spec"]["replicas"] == pool["replicas"]
            assert f'--resources={{"tandem_{role}":1}}' in container["args"]
            assert [arg for arg in container["args"] if "--labels" in arg] == [f"--labels={labels}"] * bool(labels)


def test_the_examples_show_what_they_are_for() -> None:
    rdma, nvlink, mixed = (
        merged(DEFAULTS, CASES[f"values-{name}"]) for name in ("rdma", "nvlink-node", "heterogeneous")
    )
    for role in ("prefill", "decode"):
        assert any(name.startswith("rdma/") for name in rdma[role]["resources"]["limits"])
        assert rdma[role]["ipcLock"] and rdma[role]["hostNetwork"]
        assert nvlink[role]["rayLabels"].keys() == {"ray.io/gpu-domain"} and nvlink[role]["affinity"]
    products = [mixed[role]["nodeSelector"]["nvidia.com/gpu.product"] for role in ("prefill", "decode")]
    assert len(set(products)) == 2


def of_component(objects: Objects, component: str) -> Pod:
    (pod,) = [pod for pod in pods(objects) if pod.component == component]
    return pod


def set_path(value: Any, path: str, new: Any) -> None:
    *parents, last = (int(name) if name.isdigit() else name for name in path.split())
    for name in parents:
        value = value[name]
    value[last] = new


HOOK: Final = "spec containers 0 lifecycle preStop exec command"
PLANTED: Final[list[tuple[Rule, str, str, Any]]] = [
    (selectors_find_pods, "router", "metadata labels app.kubernetes.io/component", "gateway"),
    (selectors_find_pods, "decode", "metadata labels app.kubernetes.io/component", "prefill"),
    (ports_exist, "router", "spec containers 0 ports 0 name", "web"),
    (ports_exist, "router", "spec containers 0 readinessProbe grpc port", 50053),
    (ports_exist, "decode", "spec containers 0 ports 1 name", "metric"),
    (configured_ports_are_the_pods, "router", "spec containers 0 ports 0 containerPort", 8001),
    (configured_ports_are_the_pods, "decode", "spec containers 0 ports 1 containerPort", 9401),
    (amounts_parse, "decode", "spec containers 0 resources limits memory", "4Gib"),
    (enums_are_known, "decode", "spec containers 0 imagePullPolicy", "Sometimes"),
    (pods_are_restricted, "redis", "spec securityContext runAsUser", 0),
    (pods_are_restricted, "router", "spec containers 0 securityContext runAsUser", 0),
    (pods_are_restricted, "router", "spec automountServiceAccountToken", True),
    (pods_are_restricted, "router", "spec volumes 1 hostPath", {"path": "/"}),
    (drains_fit, "router", "spec terminationGracePeriodSeconds", 60),
    (drains_fit, "decode", f"{HOOK} 5", "--within=5"),
    (leaving_workers_ask_who_is_there, "prefill", "spec containers 0 lifecycle preStop", {"sleep": {"seconds": 75}}),
    (leaving_workers_ask_who_is_there, "decode", f"{HOOK} 3", "--controller=elsewhere:50053"),
    (leaving_workers_ask_who_is_there, "decode", f"{HOOK} 4", "--after=5"),
    (volumes_are_mounted, "decode", "spec volumes 2 name", "memory"),
    (valkeys_of_the_right_kind, "gcs", "metadata labels app.kubernetes.io/component", "redis"),
]


@pytest.mark.parametrize(
    ("rule", "component", "path", "fault"), PLANTED, ids=lambda item: getattr(item, "__name__", None)
)
def test_rule_finds_a_planted_fault(
    rule: Rule, component: str, path: str, fault: Any, rendered: dict[str, Objects]
) -> None:
    objects = copy.deepcopy(rendered["everything-other-mode"])
    set_path(of_component(objects, component).template, path, fault)
    assert list(rule(objects)) != []


def test_routers_are_as_many_as_asked_and_roll_without_a_gap(rendered: dict[str, Objects]) -> None:
    def deployment(case: str) -> dict[str, Any]:
        (found,) = of_kind(rendered[case], "Deployment")
        return found["spec"]

    assert deployment("defaults")["replicas"] == 1
    assert deployment("everything")["replicas"] == 3
    assert "replicas" not in deployment("scaled")  # or each upgrade would undo what the autoscaler did
    for case in CASES:
        assert deployment(case)["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    (registry,) = [
        item for item in of_kind(rendered["everything"], "Service") if "registry" in item["metadata"]["name"]
    ]
    assert registry["spec"]["clusterIP"] == "None" and registry["spec"]["publishNotReadyAddresses"]


def test_secrets_come_by_reference(rendered: dict[str, Objects]) -> None:
    """No Secret is made, and no value holds one: passwords and tokens are named."""
    objects = rendered["everything-other-mode"]
    assert of_kind(objects, "Secret") == []
    named = {value["name"] for key, value in walk(objects) if key == "secretKeyRef"}
    assert named == {"token", "tables", "index"}


def test_a_changed_config_rolls_the_pods() -> None:
    def checksums(values: dict[str, Any]) -> set[str]:
        return {pod.template["metadata"].get("annotations", {}).get("checksum/config") for pod in pods(render(values))}

    before, after = checksums({}), checksums({"config": {"num_blocks": DEFAULTS["config"]["num_blocks"] + 1}})
    assert before & after == {None}  # Valkey does not read the config
    assert len(before) == 2


def test_both_modes_run_the_same_pods(rendered: dict[str, Objects]) -> None:
    """What KubeRay is given and what the StatefulSets run differ in the command alone, which KubeRay makes itself."""
    with_operator, plain = (
        {pod.component: copy.deepcopy(pod.spec) for pod in pods(rendered[name])}
        for name in ("defaults", "defaults-other-mode")
    )
    for spec in plain.values():
        first = spec["containers"][0]
        if first["name"].startswith("ray-"):
            assert first.pop("command")[:2] == ["ray", "start"]
            first.pop("args")
    assert with_operator == plain
