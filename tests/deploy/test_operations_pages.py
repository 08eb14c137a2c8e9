"""What a paged person reads: the values, metrics, panels, log lines and commands that the pages name are there."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pytest
import yaml

from cluster.main import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, _parser
from cluster.worker.announcing import EXIT_REFUSED
from core.errors import RejectReason
from core.messages import RefuseReason
from router.policy.choose import PlanReason
from router.policy_file import parse_policy
from telemetry.router_metrics import Outcome
from telemetry.tasks import EXIT_INVARIANT_BROKEN
from tests.deploy.chart import CHART, DEFAULTS, EVERYTHING, PLAIN, merged, pods, render
from tests.deploy.test_observability import DASHBOARDS, KNOWN

ROOT: Final = CHART.parents[2]
PAGES: Final = sorted([*(ROOT / "docs" / "operations").glob("*.md"), *(ROOT / "docs" / "runbooks").glob("*.md")])
TITLES: Final = [
    title
    for path in DASHBOARDS
    for board in [json.loads(path.read_text())]
    for title in (board["title"], *(panel["title"] for panel in board["panels"]))
]
SOURCES: Final = "\n".join(
    path.read_text()
    for room in ("cluster", "router", "kv_transfer", "telemetry", "engine", "prefill_worker", "decode_worker")
    for path in (ROOT / room).rglob("*.py")
)
POLICY_SECTIONS: Final = ("admission", "routing")  # of the policy file, not of the chart


def values_that_are_not_there(text: str) -> Iterator[str]:
    """`router.policy`, `config.num_blocks`: every name in code quotes that begins as a value of the chart does."""
    for name in re.findall(r"`([a-z][A-Za-z]*(?:\.[A-Za-z_]+)+)(?:[`=:, ])", text):
        node: Any = DEFAULTS
        for part in name.split("."):
            if part == "*" or node in ({}, []):
                break
            if not isinstance(node, dict) or part not in node:
                if name.split(".")[0] in DEFAULTS:
                    yield name
                break
            node = node[part]


def metrics_that_are_not_there(text: str) -> Iterator[str]:
    """But in apostrophes, as Ray writes its resources."""
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in KNOWN} | KNOWN
    for name in re.findall(r"(?<![\w'])(?:tandem_|tandem:|vllm:)[a-z0-9_:]*[a-z0-9]", text):
        if name not in families:
            yield name


def panels_that_are_not_there(text: str) -> Iterator[str]:
    """A title in quotes, or its beginning."""
    for name in re.findall(r'"([A-Z][A-Za-z,: ]+)"', text):
        if not any(title.startswith(name) for title in TITLES):
            yield name


def states_that_nobody_logs(text: str) -> Iterator[str]:
    for quoted, word in re.findall(r'state=(?:"([a-z ]+)"|([a-z_]+))', text):
        if f'"{quoted or word}"' not in SOURCES:
            yield quoted or word


def commands_that_are_wrong(text: str) -> Iterator[str]:
    """`tandem ...` in code quotes or on a line of its own, read by the real parser, with ROLE and the like replaced."""
    lines = re.findall(r"`(?:[^`\n]* -- )?(tandem [^`\n]+)`", text)
    lines += re.findall(r"^(?:kubectl .* -- )?(tandem .*)$", text, re.MULTILINE)
    for line in lines:
        words = shlex.split(line.replace("ROLE", "decode"))[1:]
        try:
            _parser().parse_args(words)
        except (SystemExit, argparse.ArgumentError) as error:
            # A subcommand alone is a name; what takes no arguments at all parses.
            if len(words) > 1 or not _is_command(words[0]):
                yield f"{line}: {error}"


def objects_that_are_not_there(text: str) -> Iterator[str]:
    """What kubectl is asked for: objects of the releases blue and green, containers, components."""
    objects = [item for values in (EVERYTHING, merged(PLAIN, EVERYTHING)) for item in render(values, "blue")]
    every = list(pods(objects))
    known = {f"{item['kind'].lower()}/{item['metadata']['name']}" for item in objects}
    containers = {container["name"] for pod in every for container in pod.containers}
    components = {pod.component for pod in every}
    for line in re.findall(r"kubectl [^`\n]*", text):
        for kind, name in re.findall(r"\b(deployment|service|statefulset|raycluster)[/ ]([a-z][-a-z0-9]+)", line):
            if f"{kind}/{name.replace('green', 'blue')}" not in known:
                yield f"{kind}/{name}"
        yield from (name for name in re.findall(r" -c ([a-z-]+)", line) if name not in containers)
        yield from (name for name in re.findall(r"component=([a-z]+)", line) if name not in components)


def kubectl_that_asks_nobody(text: str) -> Iterator[str]:
    """Without a namespace, without an object, or by a label that pods of other charts have too."""
    for line in re.findall(r"kubectl [^`\n]*", text):
        if " -n " not in line and not line.startswith("kubectl drain"):
            yield f"{line}: no namespace"
        if re.search(r" (logs|exec)\b", line) and not re.search(r" -l | [a-z]+/[a-z]", line):
            yield f"{line}: no object"
        if "component=" in line and not re.search(r"(name|instance)=", line):
            yield f"{line}: finds others' pods"


def _is_command(word: str) -> bool:
    """Whether it may be asked for its help."""
    try:
        _parser().parse_args([word, "--help"])
    except SystemExit as end:
        return end.code == 0
    return False


CHECKS: Final = [
    values_that_are_not_there,
    metrics_that_are_not_there,
    panels_that_are_not_there,
    states_that_nobody_logs,
    commands_that_are_wrong,
    objects_that_are_not_there,
    kubectl_that_asks_nobody,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_pages_name_what_is_there(check: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert {page.name: found for page in PAGES if (found := list(check(page.read_text())))} == {}


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (values_that_are_not_there, "`config.num_blocks`", "`config.num_block`"),
        (metrics_that_are_not_there, "`tandem_rejected_total`", "`tandem_refused_total`"),
        (panels_that_are_not_there, '"Transfer by stage"', '"Transfers by stage"'),
        (states_that_nobody_logs, "`state=orphaned num_blocks=N`", "`state=lost_blocks`"),
        (commands_that_are_wrong, "`tandem status --registry HOST:50052`", "`tandem status --router HOST`"),
        (commands_that_are_wrong, "`tandem leave`", "`tandem depart`"),
        (
            objects_that_are_not_there,
            "`kubectl logs deployment/blue-tandem-router`",
            "`kubectl logs deployment/router`",
        ),
        (objects_that_are_not_there, "`kubectl logs x -c controller`", "`kubectl logs x -c worker`"),
        (kubectl_that_asks_nobody, "`kubectl -n llm get pods`", "`kubectl get pods`"),
        (kubectl_that_asks_nobody, "`kubectl -n llm logs pod/x --previous`", "`kubectl -n llm logs --previous`"),
        (
            kubectl_that_asks_nobody,
            "`kubectl -n llm get pods -l app.kubernetes.io/name=tandem,app.kubernetes.io/component=redis`",
            "`kubectl -n llm get pods -l app.kubernetes.io/component=redis`",
        ),
    ],
)
def test_what_is_not_there_is_found(check: Any, right: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(check(right)) == []
    assert list(check(wrong)) != []


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("Exit codes", [0, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_INVARIANT_BROKEN, EXIT_REFUSED]),
        ("Why a request was turned away", RejectReason),
        ("Why a prompt is prefilled where it is", PlanReason),
        ("Why an attempt came to nothing", RefuseReason),
        ("How requests end", Outcome),
    ],
)
def test_every_exit_code_and_reason_is_explained(title: str, words: Iterable[object]) -> None:
    page = (ROOT / "docs" / "operations" / "reasons.md").read_text()
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    missing = [word for word in map(str, words) if f"`{word}" not in section and f"| {word} |" not in section]
    assert section and missing == []


def test_examples_of_the_policy_file_are_ones() -> None:
    """Each YAML block is read by the router's own reader; one of only a part is read as that part."""
    blocks = [
        yaml.safe_load(block)
        for page in PAGES
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    assert len(blocks) >= 3
    for block in blocks:
        assert set(block) <= set(POLICY_SECTIONS)
        parse_policy(yaml.safe_dump(block))
