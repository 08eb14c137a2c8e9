"""The chart, rendered by the Helm SDK: about a hundredth of a second each, where the binary takes a tenth or more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import helm_python as helm
import yaml

DEPLOY: Final = Path(__file__).resolve().parents[2] / "deploy"
CHART: Final = DEPLOY / "helm" / "tandem"
DEFAULTS: Final[dict[str, Any]] = yaml.safe_load((CHART / "values.yaml").read_text())
VALUES_FILES: Final = sorted(CHART.glob("values-*.yaml"))
NAMESPACE: Final = "prod"
KUBERNETES: Final = "1.34"  # the version whose schemas the objects are held against

PLAIN: Final = {"ray": {"operator": {"enabled": False}}}
# Every option that adds objects, once.
EVERYTHING: Final = {
    "ray": {"auth": {"secretName": "token"}, "gcsFaultTolerance": {"enabled": True, "auth": {"secretName": "tables"}}},
    "redis": {"auth": {"secretName": "index"}, "external": {"caSecretName": "ca"}},
    "monitoring": {name: {"enabled": True} for name in ("serviceMonitor", "podMonitor", "rules", "dashboards")},
    "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
    "router": {"replicas": 3},
    "config": {"host_cache_bytes": 1 << 31, "disk_cache_bytes": "16GiB"},
    "image": {"pullSecrets": [{"name": "pull"}]},
    "networkPolicy": {
        "clients": [{"podSelector": {}}],
        "scrapers": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
    },
}
SCALED: Final = {
    "router": {"autoscaling": {"kind": "hpa"}},
    "prefill": {"autoscaling": {"kind": "hpa"}},
    "decode": {"autoscaling": {"kind": "keda", "prometheusUrl": "http://prometheus:9090"}},
}


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Values of all layers; the last one wins."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            old = result.get(key)
            result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def cases() -> dict[str, dict[str, Any]]:
    """Every shape in which the chart is rendered: each values file, the defaults and all options, in both modes."""
    shapes = {path.stem: yaml.safe_load(path.read_text()) for path in VALUES_FILES}
    shapes |= {"defaults": {}, "everything": EVERYTHING, "aggregated": {"prefill": {"replicas": 0}}}
    result = {}
    for name, values in shapes.items():
        result[name] = values
        result[f"{name}-other-mode"] = merged({"ray": {"operator": {"enabled": False}}}, values) | {
            "ray": merged(values.get("ray", {}), {"operator": {"enabled": not _with_operator(values)}})
        }
    return result | {"scaled": merged(PLAIN, SCALED, EVERYTHING)}


def _with_operator(values: Mapping[str, Any]) -> bool:
    return bool(values.get("ray", {}).get("operator", {}).get("enabled", True))


@cache
def _chart() -> helm.Chart:
    """Loaded once: reading it costs more than rendering it."""
    return helm.Chart.load(str(CHART))


def render(values: Mapping[str, Any], name: str = "demo") -> list[dict[str, Any]]:
    """The objects of a release. Raises: helm.HelmError."""
    return objects_of(render_texts(values, name))


def objects_of(texts: Iterable[str]) -> list[dict[str, Any]]:
    return [item for text in texts for item in yaml.load_all(text, yaml.CSafeLoader) if item]


def render_texts(values: Mapping[str, Any], name: str = "demo") -> list[str]:
    """As `render`, as text, which takes a tenth of the time."""
    files = _chart().render(dict(values), name=name, namespace=NAMESPACE)
    return [text for path, text in files.items() if not path.endswith("NOTES.txt")]


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod template, and the object that makes pods of it."""

    owner: dict[str, Any]
    name: str
    template: dict[str, Any]

    @property
    def labels(self) -> dict[str, str]:
        return self.template["metadata"]["labels"]

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def spec(self) -> dict[str, Any]:
        return self.template["spec"]

    @property
    def containers(self) -> list[dict[str, Any]]:
        """Init containers too."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        """By name."""
        named = [port for container in self.spec["containers"] for port in container.get("ports", [])]
        return {port["name"]: port["containerPort"] for port in named}


def pods(objects: list[dict[str, Any]]) -> Iterator[Pod]:
    for item in objects:
        name = item["metadata"]["name"]
        if item["kind"] in ("Deployment", "StatefulSet"):
            yield Pod(item, name, item["spec"]["template"])
        elif item["kind"] == "RayCluster":
            yield Pod(item, f"{name}-head", item["spec"]["headGroupSpec"]["template"])
            for group in item["spec"]["workerGroupSpecs"]:
                yield Pod(item, f"{name}-{group['groupName']}", group["template"])


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] == kind]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector, matchLabels and matchExpressions with In, selects `labels`."""
    wanted = selector.get("matchLabels", {}).items()
    expressions = selector.get("matchExpressions", [])
    assert all(item["operator"] == "In" for item in expressions)
    return wanted <= labels.items() and all(labels.get(item["key"]) in item["values"] for item in expressions)
