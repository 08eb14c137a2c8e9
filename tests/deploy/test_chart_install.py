"""helm install, upgrade, rollback and uninstall by the Helm SDK, against a Kubernetes API in memory.

What the API then holds is read with the official client, as an operator's own tools would.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import helm_python as helm
import pytest
from kubernetes import client, config

from tests.deploy.chart import CHART, NAMESPACE, PLAIN, merged, render
from tests.deploy.fake_kubernetes import FakeKubernetes, kubeconfig
from tests.deploy.serving import serving

RELEASE: Final = "demo"
TWO: Final = merged(PLAIN, {"decode": {"replicas": 2}})
THREE: Final = merged(
    PLAIN, {"decode": {"replicas": 3}, "redis": {"mode": "external", "external": {"url": "redis://x"}}}
)


class Cluster:
    """Helm and the official client, both pointed at one API."""

    def __init__(self, kubernetes: FakeKubernetes, file: Path) -> None:
        self.kubernetes = kubernetes
        self.helm = helm.Config(kubeconfig_path=str(file), namespace=NAMESPACE, storage_driver="memory")
        config.load_kube_config(str(file))
        self.apps, self.core = client.AppsV1Api(), client.CoreV1Api()

    def decode_replicas(self) -> int:
        found: int = self.apps.read_namespaced_stateful_set("demo-tandem-decode", NAMESPACE).spec.replicas
        return found

    def stateful_sets(self) -> set[str]:
        return {item.metadata.name for item in self.apps.list_namespaced_stateful_set(NAMESPACE).items}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    kubernetes = FakeKubernetes()
    with serving(kubernetes.app) as port:
        file = tmp_path / "kubeconfig"
        file.write_text(kubeconfig(f"http://127.0.0.1:{port}"))
        one = Cluster(kubernetes, file)
        try:
            yield one
        finally:
            one.helm.close()
            for api in (one.apps, one.core):
                api.api_client.close()


def names(objects: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(item["kind"], item["metadata"]["name"]) for item in objects}


def test_install_upgrade_roll_back_uninstall(cluster: Cluster) -> None:
    cluster.helm.install(str(CHART), RELEASE, TWO, namespace=NAMESPACE)
    assert names(list(cluster.kubernetes.objects.values())) == names(render(TWO))
    assert cluster.decode_replicas() == 2
    before = cluster.core.read_namespaced_config_map("demo-tandem-config", NAMESPACE).data["config.yaml"]
    assert "num_decode: 2\n" in before

    cluster.helm.upgrade(str(CHART), RELEASE, THREE, namespace=NAMESPACE)
    assert cluster.decode_replicas() == 3
    assert "demo-tandem-redis" not in cluster.stateful_sets()  # what is no longer rendered is gone
    after = cluster.core.read_namespaced_config_map("demo-tandem-config", NAMESPACE).data["config.yaml"]
    assert "num_decode: 3\n" in after

    cluster.helm.rollback(RELEASE, version=1)
    assert names(list(cluster.kubernetes.objects.values())) == names(render(TWO))
    assert cluster.core.read_namespaced_config_map("demo-tandem-config", NAMESPACE).data["config.yaml"] == before

    cluster.helm.uninstall(RELEASE)
    assert cluster.kubernetes.objects == {}


def test_an_upgrade_that_is_refused_changes_nothing(cluster: Cluster) -> None:
    cluster.helm.install(str(CHART), RELEASE, {}, namespace=NAMESPACE)
    assert ("RayCluster", "demo-tandem") in names(list(cluster.kubernetes.objects.values()))
    before = {key: item["metadata"]["resourceVersion"] for key, item in cluster.kubernetes.objects.items()}
    with pytest.raises(helm.HelmError, match="/decode/replicas"):
        cluster.helm.upgrade(str(CHART), RELEASE, {"decode": {"replicas": 0}}, namespace=NAMESPACE)
    assert {key: item["metadata"]["resourceVersion"] for key, item in cluster.kubernetes.objects.items()} == before


def test_two_releases_in_one_namespace_share_nothing(cluster: Cluster) -> None:
    for release in ("blue", "green"):
        cluster.helm.install(str(CHART), release, PLAIN, namespace=NAMESPACE)
    services = cluster.core.list_namespaced_service(NAMESPACE).items
    selectors = [item.spec.selector["app.kubernetes.io/instance"] for item in services]
    assert sorted(selectors) == sorted(["blue", "green"] * (len(services) // 2))
    cluster.helm.uninstall("blue")
    assert {key.name.partition("-")[0] for key in cluster.kubernetes.objects} == {"green"}
