"""Values: the schema is closed and complete, each value is explained, and what is wrong is refused by its path."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import helm_python as helm
import pytest

from tests.deploy.chart import CHART, DEFAULTS, EVERYTHING, PLAIN, SCALED, cases, merged, of_kind, render, render_texts

SCHEMA: Final = json.loads((CHART / "values.schema.json").read_text())

Path = tuple[str, ...]


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        return SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    return schema


def walk(values: Mapping[str, Any], schema: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that the chart's schema names, maps before what is in them."""
    for name, value in values.items():
        here = resolved(schema["properties"][name])
        yield (*path, name), value
        if "properties" in here:
            yield from walk(value, here, (*path, name))


PATHS: Final = dict(walk(DEFAULTS, SCHEMA))
BOOLEANS: Final = [path for path, value in PATHS.items() if isinstance(value, bool)]


# In one of these each value counts; most do in the first.
KEDA: Final = {"autoscaling": {"kind": "keda", "prometheusUrl": "http://prometheus:9090"}}
BASES: Final[list[dict[str, Any]]] = [
    merged(PLAIN, SCALED, EVERYTHING, {"prefill": KEDA, "decode": KEDA}),
    EVERYTHING,
    merged(PLAIN, {"networkPolicy": {"nodes": ["10.0.0.0/16"]}}),
    {"redis": {"mode": "external", "external": {"url": "redis://x"}}},
    {"redis": {"mode": "external", "external": {"urlSecret": {"name": "url"}}}},
    {"model": {"source": "claim", "claim": {"name": "models"}}},
    {"model": {"source": "image", "image": {"reference": "models/x@sha256:0"}}},
    {"model": {"source": "init", "init": {"image": "fetch:1"}}},
]
# Other values than the defaults, where the default does not tell one that is right.
OTHERS: Final[dict[str, Any]] = {
    "adapters": {"poet": "/models/adapters/poet"},
    "requests": {"memory": "5Gi"},
    "limits": {"memory": "5Gi"},
    "maxMemory": "70mb",
    "url": "redis://y",
    "hostNetwork": True,
    "pullSecrets": [{"name": "pull"}],
    "args": ["x"],
    "command": ["x"],
    "env": [{"name": "X", "value": "y"}],
    "nodes": ["10.1.0.0/16"],
    "resources": {"limits": {"memory": "5Gi"}},
    "digest": "sha256:" + "1" * 64,
    "trace_endpoint": "http://collector:4318/v1/traces",
    "numa_nodes": "0,1",
    "prometheusUrl": "http://elsewhere",
}


def others(path: Path) -> list[Any]:
    """Values that the chart must answer to with other objects."""
    value, schema = PATHS[path], schema_of(path)
    if path[-1] in OTHERS:
        return [OTHERS[path[-1]]]
    if "enum" in schema:
        return list(schema["enum"])
    match value:
        case bool():
            return [True, False]
        case int() | float():
            return [value + 1, value - 1]
        case str():
            return [{"Gi": "3Gi", "Mi": "300Mi"}.get(value[-2:], value + "x"), "9s"]
        case dict():
            return [{"example.com/key": "value"}] if "properties" not in schema else []
        case _:
            return [[{"key": "value"}]]


def schema_of(path: Path) -> dict[str, Any]:
    schema = SCHEMA
    for name in path:
        schema = resolved(schema["properties"][name])
    return schema


def with_value(path: Path, value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return value


def dotted(path: Path) -> str:
    return ".".join(path)


def test_the_schema_is_closed_and_names_what_values_has() -> None:
    def look(schema: dict[str, Any], values: Mapping[str, Any], path: Path) -> None:
        assert schema["additionalProperties"] is False, path
        assert list(schema["required"]) == list(values), path  # so that null is refused, by its path
        assert set(schema["properties"]) - {"global"} == set(values), path
        for name, value in values.items():
            here = resolved(schema["properties"][name])
            if "properties" in here and "required" in here and here["required"]:
                look(here, value, (*path, name))

    look(SCHEMA, DEFAULTS, ())
    assert len(PATHS) > 150


def test_every_value_has_its_comment() -> None:
    """On the line before it; a map whose values are explained may go without."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    bare = []
    for number, line in enumerate(lines):
        if re.match(r" *[A-Za-z_]+:", line):
            is_map = line.endswith(":") and lines[number + 1].strip().startswith("#")
            # requests and limits go with `resources`
            explained = lines[number - 1].strip().startswith("#") or line.strip().startswith(("requests:", "limits:"))
            if not is_map and not explained:
                bare.append(line)
    assert bare == []


def has_effect(path: Path, before: list[list[str]]) -> bool:
    """Whether another value makes other objects, in any of the bases, of which `before` was made."""
    for base, texts in zip(BASES, before, strict=True):
        for value in others(path):
            try:
                if render_texts(merged(base, with_value(path, value))) != texts:
                    return True
            except helm.HelmError:
                continue
    return False


def test_every_value_is_read_by_a_template() -> None:
    before = [render_texts(base) for base in BASES]
    leaves = [path for path in PATHS if others(path)]
    assert len(leaves) > 170
    assert [dotted(path) for path in leaves if not has_effect(path, before)] == []


@pytest.mark.parametrize("mode", [{}, PLAIN], ids=["operator", "plain"])
def test_null_renders_or_is_refused_by_its_path(mode: dict[str, Any]) -> None:
    for path in PATHS:
        try:
            render(merged(mode, with_value(path, None)))
        except helm.HelmValuesError as error:
            where = "/" + "/".join(path[:-1]) if path[:-1] else ""
            assert f"at '{where}': missing property '{path[-1]}'" in str(error), dotted(path)


@pytest.mark.parametrize("mode", [{}, PLAIN, merged(PLAIN, SCALED)], ids=["operator", "plain", "scaled"])
def test_each_boolean_flipped_renders_or_is_refused_by_its_path(mode: dict[str, Any]) -> None:
    assert len(BOOLEANS) > 10
    for path in BOOLEANS:
        flipped = merged(mode, with_value(path, not PATHS[path]))
        try:
            assert render(flipped), dotted(path)
        except helm.HelmValuesError as error:
            # An option that needs another value names that value.
            known = "/inferencePool/endpointPicker/name", "/autoscaling/kind", "/networkPolicy/nodes"
            assert any(name in str(error) for name in known), dotted(path)


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"typo": 1}, "'typo'"),
        ({"decode": {"replica": 2}}, "at '/decode': additional properties 'replica'"),
        ({"decode": {"replicas": 0}}, "/decode/replicas"),
        ({"decode": {"replicas": "2"}}, "/decode/replicas"),
        ({"decode": {"autoscaling": {"kind": "hpa"}}}, "/decode/autoscaling/kind"),
        ({"prefill": {"shmSize": "1GB"}}, "/prefill/shmSize"),
        ({"prefill": {"resources": {"limits": {"memory": "4Gib"}}}}, "/prefill/resources/limits/memory"),
        ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
        ({"image": {"digest": "sha256:12"}}, "/image/digest"),
        ({"model": {"source": "claim"}}, "/model/claim/name"),
        ({"model": {"source": "image"}}, "/model/image/reference"),
        ({"model": {"source": "init"}}, "/model/init/image"),
        ({"model": {"path": "../secrets"}}, "/model/path"),
        ({"redis": {"mode": "external"}}, "/redis/external/url"),
        ({"redis": {"mode": "external", "external": {"url": "http://x"}}}, "/redis/external/url"),
        ({"config": {"dtype": "float16"}}, "/config/dtype"),
        ({"config": {"num_block": 3}}, "at '/config': additional properties 'num_block'"),
        ({"router": {"replicas": 0}}, "/router/replicas"),
        ({"router": {"autoscaling": {"kind": "keda"}}}, "/router/autoscaling/kind"),
        ({"inferencePool": {"enabled": True}}, "/inferencePool/endpointPicker/name"),
        (merged(PLAIN, {"decode": {"autoscaling": {"kind": "keda"}}}), "/decode/autoscaling/prometheusUrl"),
        (merged(PLAIN, {"prefill": {"replicas": 0, "autoscaling": {"kind": "hpa"}}}), "/prefill/replicas"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_value_is_refused_by_its_path(values: dict[str, Any], path: str) -> None:
    with pytest.raises(helm.HelmValuesError) as refused:
        render(values)
    assert path in str(refused.value)


NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LONG: Final = "a" * 62 + "z"


@pytest.mark.parametrize(
    ("values", "release"),
    [({}, "r" * 53), ({"fullnameOverride": LONG}, "demo"), ({"nameOverride": LONG}, "r" * 53)],
    ids=["release", "fullname", "both"],
)
@pytest.mark.parametrize("mode", ["everything", "everything-other-mode", "scaled"])
def test_long_names_fit(mode: str, values: dict[str, Any], release: str) -> None:
    objects = render(merged(cases()[mode], values), release)
    names = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(set(names)) == len(names)
    for kind, name in names:
        assert NAME.fullmatch(name), name
        # A StatefulSet's pods get a label of its name and a hash; KubeRay appends to a cluster's name.
        assert len(name) <= {"StatefulSet": 52, "RayCluster": 40}.get(kind, 63), name
    for item in objects:
        for value in item["metadata"]["labels"].values():
            assert len(value) <= 63


def test_long_names_that_differ_at_the_end_stay_apart() -> None:
    one, other = (of_kind(render({"fullnameOverride": "x" * 60 + end}), "Deployment") for end in ("a", "b"))
    assert one[0]["metadata"]["name"] != other[0]["metadata"]["name"]


def test_helm_refuses_longer_releases_itself() -> None:
    with pytest.raises(helm.HelmError):
        helm.validate_release_name("r" * 63)
