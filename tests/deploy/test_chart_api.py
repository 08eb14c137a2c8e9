"""What no schema says and a cluster refuses: the API server on an upgrade, KubeRay, the controllers of budgets and of
network policies.

Each rule is a function of rendered objects that yields what is wrong; it is run over every case, and over objects with
the fault planted.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import helm_python as helm
import pytest
import yaml

from tests.deploy.chart import (
    CHART,
    PLAIN,
    VALUES_FILES,
    cases,
    merged,
    objects_of,
    of_kind,
    pods,
    render,
    render_texts,
    selects,
)
from tests.deploy.test_chart_values import PATHS, SCHEMA, with_value

CASES: Final = cases()
Objects = list[dict[str, Any]]
Rule = Callable[[Objects], Iterator[str]]

SERVICE_NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035


def budgets_let_pods_go(objects: Objects) -> Iterator[str]:
    """The controller of budgets asks the owner of pods for its scale. A RayCluster has none (its CRD), so that
    only a number of pods that stay can be told of its pods."""
    for budget in of_kind(objects, "PodDisruptionBudget"):
        name, spec = budget["metadata"]["name"], budget["spec"]
        owners = {pod.owner["kind"] for pod in pods(objects) if selects(spec["selector"], pod.labels)}
        stay = spec.get("minAvailable")
        if owners == {"RayCluster"}:
            (cluster,) = of_kind(objects, "RayCluster")
            groups = {group["groupName"]: group["replicas"] for group in cluster["spec"]["workerGroupSpecs"]}
            replicas = groups[spec["selector"]["matchLabels"]["app.kubernetes.io/component"]]
            if not isinstance(stay, int) or not 0 <= stay < replicas or "maxUnavailable" in spec:
                yield f"{name}: {stay} of {replicas} pods stay"
        elif spec.get("maxUnavailable", 0) < 1:
            yield f"{name}: no pod may go"


def kuberay_takes_the_cluster(objects: Objects) -> Iterator[str]:
    """As the operator's own validation before it makes a pod."""
    for cluster in of_kind(objects, "RayCluster"):
        spec, name = cluster["spec"], cluster["metadata"]["name"]
        if not SERVICE_NAME.fullmatch(name) or len(name) > 50:
            yield f"the name {name}"
        head = spec["headGroupSpec"]
        names = {item["name"] for item in head["template"]["spec"]["containers"][0]["env"]}
        if "gcsFaultToleranceOptions" in spec:
            names &= {"REDIS_USERNAME", "REDIS_PASSWORD", "RAY_REDIS_ADDRESS"}
        else:
            names &= {"REDIS_USERNAME", "RAY_REDIS_ADDRESS"}
        yield from (f"{item} in the head's environment" for item in names)
        for group in [head, *spec["workerGroupSpecs"]]:
            given = group["rayStartParams"].keys()
            if given & {"labels", "redis-password", "redis-username"}:
                yield f"rayStartParams {given}"
            if group.get("resources") and given & {"num-cpus", "num-gpus", "memory", "resources"}:
                yield f"resources twice: {given}"


def policies_let_our_pods_in(objects: Objects) -> Iterator[str]:
    """A pod with hostNetwork calls from its node's address, which no selector of pods finds."""
    if not any(pod.spec.get("hostNetwork") for pod in pods(objects)):
        return
    for policy in of_kind(objects, "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            peers = rule.get("from", [])
            if any("podSelector" in peer for peer in peers) and not any("ipBlock" in peer for peer in peers):
                yield f"{policy['metadata']['name']}: no pod with hostNetwork reaches it"


def prometheus_reaches_the_router(objects: Objects) -> Iterator[str]:
    if not of_kind(objects, "ServiceMonitor"):
        return
    for policy in of_kind(objects, "NetworkPolicy"):
        if policy["metadata"]["name"].endswith("-router"):
            (rule,) = [rule for rule in policy["spec"]["ingress"] if "ports" in rule]
            if "from" in rule and not any("monitoring" in json.dumps(peer) for peer in rule["from"]):
                yield "clients are named, and Prometheus is none of them"


def keyed_lists_have_each_key_once(objects: Objects) -> Iterator[str]:
    """Helm applies on the server, which merges these lists by key and refuses one that comes twice."""
    keys = {
        "env": ("name",),
        "volumes": ("name",),
        "containers": ("name",),
        "initContainers": ("name",),
        "volumeMounts": ("mountPath",),
        "imagePullSecrets": ("name",),
    }

    def look(value: Any, where: str) -> Iterator[str]:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            names = keys.get(key, ())
            if key == "ports" and isinstance(item, list) and item:
                names = ("containerPort",) if "containerPort" in item[0] else ("port",)
            if names and isinstance(item, list):
                found = [tuple(entry[name] for name in names) for entry in item]
                yield from (f"{where}/{key}: {one} twice" for one in set(found) if found.count(one) > 1)
            if isinstance(item, dict | list):
                yield from look(item, f"{where}/{key}")

    for item in objects:
        yield from look(item, item["metadata"]["name"])


def services_have_names_that_dns_takes(objects: Objects) -> Iterator[str]:
    for service in of_kind(objects, "Service"):
        if not SERVICE_NAME.fullmatch(service["metadata"]["name"]):
            yield service["metadata"]["name"]


def every_pod_can_pull(objects: Objects) -> Iterator[str]:
    secrets = {json.dumps(pod.spec.get("imagePullSecrets")) for pod in pods(objects)}
    if len(secrets) != 1:
        yield f"pods pull with different secrets: {secrets}"


def scalers_have_a_range(objects: Objects) -> Iterator[str]:
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        if not 1 <= scaler["spec"]["minReplicas"] <= scaler["spec"]["maxReplicas"]:
            yield scaler["metadata"]["name"]
    for scaler in of_kind(objects, "ScaledObject"):
        if not 0 <= scaler["spec"]["minReplicaCount"] <= scaler["spec"]["maxReplicaCount"]:
            yield scaler["metadata"]["name"]


def a_rollout_is_given_the_time_it_takes(objects: Objects) -> Iterator[str]:
    """A router is ready once a worker is; Kubernetes calls a rollout failed after ten minutes, if nobody says more."""
    (text,) = [item["data"]["config.yaml"] for item in of_kind(objects, "ConfigMap") if "config.yaml" in item["data"]]
    for deployment in of_kind(objects, "Deployment"):
        if deployment["spec"].get("progressDeadlineSeconds", 600) <= yaml.safe_load(text)["start_timeout_s"]:
            yield deployment["metadata"]["name"]


RULES: Final[list[Rule]] = [
    budgets_let_pods_go,
    kuberay_takes_the_cluster,
    policies_let_our_pods_in,
    prometheus_reaches_the_router,
    keyed_lists_have_each_key_once,
    services_have_names_that_dns_takes,
    every_pod_can_pull,
    scalers_have_a_range,
    a_rollout_is_given_the_time_it_takes,
]


@pytest.fixture(scope="module")
def rendered() -> dict[str, Objects]:
    return {name: render(values) for name, values in CASES.items()}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule, rendered: dict[str, Objects]) -> None:
    assert {name: found for name, objects in rendered.items() if (found := list(rule(objects)))} == {}


def only(objects: Objects, kind: str, suffix: str = "") -> dict[str, Any]:
    (found,) = [item for item in of_kind(objects, kind) if item["metadata"]["name"].endswith(suffix)]
    return found


def head_env(objects: Objects) -> list[dict[str, Any]]:
    head = only(objects, "RayCluster")["spec"]["headGroupSpec"]["template"]["spec"]
    env: list[dict[str, Any]] = head["containers"][0]["env"]
    return env


def without_blocks(objects: Objects) -> None:
    for rule in only(objects, "NetworkPolicy", "-redis")["spec"]["ingress"]:
        rule["from"] = [peer for peer in rule["from"] if "ipBlock" not in peer]


# A rule, a case in which it holds, and the fault.
PLANTED: Final[list[tuple[Rule, str, Callable[[Objects], Any]]]] = [
    (
        budgets_let_pods_go,
        "values-rdma",
        lambda objects: only(objects, "PodDisruptionBudget", "decode")["spec"].update(maxUnavailable=1),
    ),
    (
        budgets_let_pods_go,
        "defaults",
        lambda objects: only(objects, "PodDisruptionBudget", "decode")["spec"].update(minAvailable=1),
    ),
    (kuberay_takes_the_cluster, "values-rdma", lambda objects: head_env(objects).append({"name": "REDIS_PASSWORD"})),
    (
        kuberay_takes_the_cluster,
        "defaults",
        lambda objects: only(objects, "RayCluster")["metadata"].update(name="1st"),
    ),
    (policies_let_our_pods_in, "values-rdma", without_blocks),
    (
        prometheus_reaches_the_router,
        "everything",
        lambda objects: only(objects, "NetworkPolicy", "-router")["spec"]["ingress"][1].update({"from": []}),
    ),
    (keyed_lists_have_each_key_once, "defaults", lambda objects: head_env(objects).append({"name": "HOME"})),
    (
        keyed_lists_have_each_key_once,
        "defaults",
        lambda objects: only(objects, "Service", "-router")["spec"]["ports"][1].update(port=80),
    ),
    (
        services_have_names_that_dns_takes,
        "defaults",
        lambda objects: only(objects, "Service", "-router")["metadata"].update(name="a.b"),
    ),
    (
        every_pod_can_pull,
        "everything",
        lambda objects: only(objects, "StatefulSet", "-gcs")["spec"]["template"]["spec"].pop("imagePullSecrets"),
    ),
    (
        scalers_have_a_range,
        "scaled",
        lambda objects: only(objects, "HorizontalPodAutoscaler", "-router")["spec"].update(minReplicas=9),
    ),
    (
        a_rollout_is_given_the_time_it_takes,
        "defaults",
        lambda objects: only(objects, "Deployment")["spec"].pop("progressDeadlineSeconds"),
    ),
]


@pytest.mark.parametrize(("rule", "case", "plant"), PLANTED, ids=lambda item: getattr(item, "__name__", item))
def test_rule_finds_a_planted_fault(
    rule: Rule, case: str, plant: Callable[[Objects], Any], rendered: dict[str, Objects]
) -> None:
    objects = copy.deepcopy(rendered[case])
    plant(objects)
    assert list(rule(objects)) != []


@pytest.mark.parametrize(
    ("values", "release", "names"),
    [
        ({}, "1st", "fullnameOverride"),
        ({}, "llm.blue", "fullnameOverride"),
        ({"fullnameOverride": "1st"}, "demo", "/fullnameOverride"),
        ({"router": {"service": {"httpPort": 50051}}}, "demo", "router.service.grpcPort"),
        ({"router": {"autoscaling": {"kind": "hpa", "minReplicas": 9}}}, "demo", "router.autoscaling.minReplicas"),
        (
            {"config": {"tensor_parallel_size": 2}, "decode": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
            "demo",
            "decode.resources.limits",
        ),
        ({"prefill": {"hostNetwork": True}}, "demo", "/networkPolicy/nodes"),
        ({"decode": {"hostNetwork": True}}, "demo", "/networkPolicy/nodes"),
        ({"head": {"env": [{"name": "HOME", "value": "/root"}]}}, "demo", "/head/env/0/name"),
        (
            {"monitoring": {"serviceMonitor": {"enabled": True}}, "networkPolicy": {"clients": [{"podSelector": {}}]}},
            "demo",
            "/networkPolicy/scrapers",
        ),
        (
            {
                "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
                "networkPolicy": {"clients": [{"podSelector": {}}]},
            },
            "demo",
            "/networkPolicy/scrapers",
        ),
    ],
)
def test_what_a_cluster_would_refuse_is_refused_by_its_value(values: dict[str, Any], release: str, names: str) -> None:
    with pytest.raises(helm.HelmError, match=names):
        render(values, release)


def test_every_name_that_the_chart_gives_is_refused_in_values() -> None:
    given = {
        item["name"]
        for values in CASES.values()
        for pod in pods(render(values))
        for container in pod.containers
        for item in container.get("env", [])
    }
    examples = {
        item["name"]
        for file in VALUES_FILES
        for part in yaml.safe_load(file.read_text()).values()
        for item in (part.get("env", []) or part.get("init", {}).get("env", []))
    }
    assert given - examples <= set(SCHEMA["$defs"]["ownEnv"]["enum"])


def immutable(item: dict[str, Any]) -> Any:
    """What the API server lets nobody change of an object that is there."""
    spec = item.get("spec", {})
    match item["kind"]:
        case "StatefulSet":
            return {key: value for key, value in spec.items() if key not in ("replicas", "template")}
        case "Deployment":
            return spec["selector"]
        case "Service":
            return spec.get("clusterIP")
        case _:
            return None


def other(value: Any) -> Any:
    """A value of the same type that a schema may take."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case "":
            return "other"
        case str():
            return {"1Gi": "2Gi", "2Gi": "3Gi"}.get(value, value + "x")
        case _:
            return None


@pytest.mark.parametrize("base", ["everything", "everything-other-mode", "scaled"])
def test_an_upgrade_changes_what_may_be_changed(base: str) -> None:
    """Each value by itself; those that cannot be changed later say so where they are explained."""
    texts = set(render_texts(CASES[base]))
    before = {(item["kind"], item["metadata"]["name"]): immutable(item) for item in objects_of(texts)}
    refused, tried = set(), 0
    for path, value in PATHS.items():
        if path[0] in ("fullnameOverride", "nameOverride") or other(value) is None:
            continue  # other names are other objects
        try:
            after = objects_of(set(render_texts(merged(CASES[base], with_value(path, other(value))))) - texts)
        except helm.HelmError:
            continue
        tried += 1
        if any(
            before.get((item["kind"], item["metadata"]["name"]), immutable(item)) != immutable(item) for item in after
        ):
            refused.add(".".join(path))
    assert tried > 80
    expected = {
        f"{valkey}.storage.{name}" for valkey in ("redis", "ray.gcsFaultTolerance") for name in ("size", "className")
    }
    assert refused == expected
    explained = re.findall(r"# Volume.*?$|# Its volume.*?$", (CHART / "values.yaml").read_text(), re.MULTILINE)
    assert len(explained) == 2 and all("Kubernetes refuses an upgrade" in text for text in explained)


def test_a_new_chart_that_renders_the_same_pods_replaces_none(tmp_path: Path) -> None:
    values = merged(PLAIN, {"image": {"digest": "sha256:" + "0" * 64}})
    for file in CHART.rglob("*"):
        if file.is_file():
            target = tmp_path / file.relative_to(CHART)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    about = (tmp_path / "Chart.yaml").read_text()
    (tmp_path / "Chart.yaml").write_text(re.sub(r"(?m)^(version|appVersion): .*", r"\1: 9.9.9", about))
    with helm.Chart.load(str(tmp_path)) as chart:
        texts = chart.render(values, name="demo", namespace="prod")
    manifests = [text for path, text in texts.items() if not path.endswith("NOTES.txt")]
    newer = [item for text in manifests for item in yaml.safe_load_all(text) if item]
    assert [pod.template for pod in pods(newer)] == [pod.template for pod in pods(render(values))]
    changed = {item["metadata"]["labels"]["helm.sh/chart"] for item in newer}
    assert changed == {"tandem-9.9.9"}  # the objects themselves say what made them
