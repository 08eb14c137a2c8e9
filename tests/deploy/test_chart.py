"""The chart under the real validators: helm itself, Kubernetes' schemas, the CRDs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deploy.chart import CHART, KUBERNETES, NAMESPACE, VALUES_FILES, cases, of_kind, render
from tests.deploy.tools import helm_binary

CASES: Final = cases()
# Data files beside the repository, where the project is developed and in CI; they are not part of it.
CRDS: Final = CHART.parents[3] / "shared" / "crds"
CRD_FILES: Final = {
    "RayCluster": "ray.io_rayclusters.yaml",
    "InferencePool": "inference.networking.k8s.io_inferencepools.yaml",
}
# Kinds whose schemas are neither Kubernetes' own nor among the CRDs; test_chart_objects.py looks at them.
UNKNOWN_KINDS: Final = {*CRD_FILES, "ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject"}


def helm_run(*arguments: str) -> str:
    command = [str(helm_binary()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("file", [CHART / "values.yaml", *VALUES_FILES], ids=lambda path: path.stem)
def test_helm_lints_and_renders_each_values_file(file: Path) -> None:
    helm_run("lint", "--strict", str(CHART), "-f", str(file))
    flags = ["--namespace", NAMESPACE, "--kube-version", KUBERNETES, "-f", str(file)]
    text = helm_run("template", "demo", str(CHART), *flags)
    by_binary = [item for item in yaml.load_all(text, yaml.CSafeLoader) if item]
    by_sdk = render(yaml.safe_load(file.read_text()))

    def in_order(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(objects, key=lambda item: (item["kind"], item["metadata"]["name"]))

    assert in_order(by_binary) == in_order(by_sdk)  # what the other tests look at is what helm makes


def test_helm_refuses_what_is_older_than_the_chart_needs() -> None:
    with pytest.raises(AssertionError, match="kubeVersion"):
        helm_run("template", "demo", str(CHART), "--kube-version", "1.29.0")


def test_objects_follow_kubernetes_schemas() -> None:
    """Each different object of all cases once: a look into a schema takes a twentieth of a second."""
    objects = {json.dumps(item): item for values in CASES.values() for item in render(values)}
    checked = [item for item in objects.values() if item["kind"] not in UNKNOWN_KINDS]
    assert len(checked) > 60
    for item in checked:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)


def test_kubernetes_schemas_find_a_wrong_field() -> None:
    """The positive control of the test above."""
    (deployment,) = of_kind(render({}), "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(deployment, KUBERNETES, strict=True)


def closed(schema: Any) -> Any:
    """A CRD's schema as JSON Schema in which unknown fields fail."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: value if key in ("default", "enum") else closed(value) for key, value in schema.items()}
    if result.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    free = ("x-kubernetes-preserve-unknown-fields", "x-kubernetes-embedded-resource", "additionalProperties")
    if isinstance(result.get("properties"), dict) and not any(result.get(key) for key in free):
        result["additionalProperties"] = False
    return result


@pytest.fixture(scope="module")
def crd_validator() -> Callable[[str], jsonschema.Draft202012Validator]:
    if not CRDS.is_dir():
        pytest.skip(f"the CRDs are not part of the project, and {CRDS.parent.name}/{CRDS.name} is not beside it")
    validators = {}
    for kind, name in CRD_FILES.items():
        crd = yaml.load((CRDS / name).read_text(), yaml.CSafeLoader)
        (version,) = [item for item in crd["spec"]["versions"] if item["name"] == "v1"]
        schema = closed(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        validators[kind] = jsonschema.Draft202012Validator(schema)
    return validators.__getitem__


def test_custom_resources_follow_their_crds(crd_validator: Callable[[str], jsonschema.Draft202012Validator]) -> None:
    seen = set()
    for values in CASES.values():
        for item in render(values):
            if item["kind"] in CRD_FILES:
                crd_validator(item["kind"]).validate(item)
                seen.add(item["kind"])
    assert seen == set(CRD_FILES)


def test_crds_find_a_wrong_field(crd_validator: Callable[[str], jsonschema.Draft202012Validator]) -> None:
    """The positive control of the test above, also deep inside the pod's template."""
    (cluster,) = of_kind(render({}), "RayCluster")
    cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["portz"] = []
    with pytest.raises(jsonschema.ValidationError, match="portz"):
        crd_validator("RayCluster").validate(cluster)
