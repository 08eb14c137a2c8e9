"""A small Kubernetes API in memory: discovery, create, read, list, apply, update, delete, conflicts.

As much as Helm and the official client need to install, upgrade and roll back; nothing runs, and every object is what
it was last told to be.
"""

from __future__ import annotations

import json
import uuid
from typing import Any, Final, NamedTuple

import yaml
from aiohttp import web

# (group/version, plural): kind
KINDS: Final = {
    ("v1", "pods"): "Pod",
    ("v1", "services"): "Service",
    ("v1", "configmaps"): "ConfigMap",
    ("v1", "serviceaccounts"): "ServiceAccount",
    ("apps/v1", "deployments"): "Deployment",
    ("apps/v1", "statefulsets"): "StatefulSet",
    ("policy/v1", "poddisruptionbudgets"): "PodDisruptionBudget",
    ("networking.k8s.io/v1", "networkpolicies"): "NetworkPolicy",
    ("autoscaling/v2", "horizontalpodautoscalers"): "HorizontalPodAutoscaler",
    ("ray.io/v1", "rayclusters"): "RayCluster",
}
VERBS: Final = ["create", "delete", "get", "list", "patch", "update"]


class Key(NamedTuple):
    """Where an object lies."""

    group_version: str
    plural: str
    namespace: str
    name: str


class Refused(Exception):
    """Answered with a Status object."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class FakeKubernetes:
    """The handlers; `objects` is all it holds."""

    def __init__(self) -> None:
        self.objects: dict[Key, dict[str, Any]] = {}
        self._version = 0

    def app(self) -> web.Application:
        """To be served."""
        app = web.Application(client_max_size=16 << 20)
        app.router.add_route("*", "/{path:.*}", self.handle)
        return app

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == "/openapi/v2":  # protobuf, empty: no schemas to validate against
            return web.Response(body=b"", content_type="application/octet-stream")
        try:
            return web.json_response(self._answer(request, await request.text()))
        except Refused as error:
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "metadata": {}}
            status |= {"message": str(error), "reason": error.reason, "code": error.code}
            return web.json_response(status, status=error.code)

    def _answer(self, request: web.Request, text: str) -> dict[str, Any]:
        parts = [part for part in request.path.split("/") if part]
        match parts:
            case ["version"]:
                return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
            case ["api"]:
                return {"kind": "APIVersions", "versions": ["v1"]}
            case ["apis"]:
                return {"kind": "APIGroupList", "apiVersion": "v1", "groups": _groups()}
            case ["api", version]:
                return _resources(version)
            case ["apis", group, version]:
                return _resources(f"{group}/{version}")
            case ["api", version, "namespaces", namespace, plural, *name]:
                return self._resource(request, text, Key(version, plural, namespace, "".join(name)))
            case ["apis", group, version, "namespaces", namespace, plural, *name]:
                return self._resource(request, text, Key(f"{group}/{version}", plural, namespace, "".join(name)))
        raise Refused(404, "NotFound", f"no such path: {request.path}")

    def _resource(self, request: web.Request, text: str, key: Key) -> dict[str, Any]:
        kind = KINDS.get(key[:2])
        if kind is None:
            raise Refused(404, "NotFound", f"the server has no {key.plural} in {key.group_version}")
        body = yaml.safe_load(text) if text else None  # JSON is YAML
        if request.method == "POST":
            return self._create(key._replace(name=body["metadata"]["name"]), body)
        if not key.name:
            items = [item for other, item in self.objects.items() if other[:3] == key[:3]]
            return {"kind": f"{kind}List", "apiVersion": key.group_version, "metadata": {}, "items": items}
        old = self.objects.get(key)
        if old is None and request.method == "PATCH":  # a server-side apply
            return self._create(key, body)
        if old is None:
            raise Refused(404, "NotFound", f'{key.plural} "{key.name}" not found')
        match request.method:
            case "GET":
                return old
            case "DELETE":
                del self.objects[key]
                return {"kind": "Status", "apiVersion": "v1", "status": "Success", "metadata": {}}
            case "PUT" | "PATCH":  # with one field manager an apply is a replacement: what it does not say is gone
                return self._replace(key, old, body)
        raise Refused(405, "MethodNotAllowed", request.method)

    def _create(self, key: Key, item: dict[str, Any]) -> dict[str, Any]:
        if key in self.objects:
            raise Refused(409, "AlreadyExists", f'{key.plural} "{key.name}" already exists')
        item["metadata"] |= {"namespace": key.namespace, "uid": str(uuid.uuid4()), "generation": 1}
        return self._put(key, item)

    def _replace(self, key: Key, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        wanted = new["metadata"].get("resourceVersion")
        if wanted not in (None, old["metadata"]["resourceVersion"]):
            raise Refused(409, "Conflict", f'{key.plural} "{key.name}" has been modified')
        new["metadata"] |= {name: old["metadata"][name] for name in ("uid", "generation", "namespace")}
        if new.get("spec") != old.get("spec"):
            new["metadata"]["generation"] += 1
        return self._put(key, new)

    def _put(self, key: Key, item: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        item |= {"apiVersion": key.group_version, "kind": KINDS[key[:2]]}
        self.objects[key] = item
        return item


def _groups() -> list[dict[str, Any]]:
    versions = sorted({group_version for group_version, _ in KINDS if "/" in group_version})
    result = []
    for group_version in versions:
        group, version = group_version.split("/")
        entry = {"groupVersion": group_version, "version": version}
        result.append({"name": group, "versions": [entry], "preferredVersion": entry})
    return result


def _resources(group_version: str) -> dict[str, Any]:
    kinds = [(plural, kind) for (other, plural), kind in KINDS.items() if other == group_version]
    if not kinds:
        raise Refused(404, "NotFound", group_version)
    items = [
        {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": VERBS}
        for plural, kind in kinds
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": items}


def kubeconfig(url: str) -> str:
    """What clients read to find it."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": url}}],
            "users": [{"name": "nobody", "user": {}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "nobody"}}],
            "current-context": "fake",
        }
    )
