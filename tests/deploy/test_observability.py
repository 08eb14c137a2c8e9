"""Rules, alerts, runbooks, dashboards: each expression parses and names what we export, each alert fires when it must.

promtool comes from the machine or Debian's package (tests/deploy/tools.py).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from prometheus_client import CollectorRegistry

from router.admission.policy import Band
from telemetry.router_metrics import PolicyMetrics, RouterMetrics, RouterState, RouterStateCollector, RoutingMetrics
from telemetry.slo_metrics import SloTargets
from telemetry.trace_metrics import TraceMetrics
from telemetry.worker_metrics import WorkerMetrics
from tests.deploy.chart import CHART, render
from tests.deploy.tools import prometheus_tool
from tests.telemetry.test_metrics import STATE

RULES: Final = CHART / "observability" / "rules.yaml"
DASHBOARDS: Final = sorted((CHART / "observability" / "dashboards").glob("*.json"))
UNIT_TESTS: Final = Path(__file__).parent / "alerts.yaml"
ROOT: Final = CHART.parents[2]

GROUPS: Final[list[dict[str, Any]]] = yaml.safe_load(RULES.read_text())["groups"]
ALL_RULES: Final = [rule for group in GROUPS for rule in group["rules"]]
ALERTS: Final = [rule for rule in ALL_RULES if "alert" in rule]

SUFFIXES: Final = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
OURS: Final = re.compile(r"\b(?:tandem|vllm)[_:][a-zA-Z0-9_:]*")


def exported() -> set[str]:
    """Every series that a router or a worker exports."""
    registry = CollectorRegistry()
    RouterMetrics(registry, "tiny", SloTargets(ttft_s=2.5, itl_s=0.1), tuple(Band))
    RoutingMetrics(registry)
    PolicyMetrics(registry)
    TraceMetrics(registry)
    registry.register(RouterStateCollector(lambda: RouterState(0, {}, {}, 0, 0, 0), "tiny"))
    WorkerMetrics(registry, lambda: STATE)
    return {family.name + suffix for family in registry.collect() for suffix in SUFFIXES[family.type]}


KNOWN: Final = exported() | {rule["record"] for rule in ALL_RULES if "record" in rule}


def dashboard_expressions() -> list[tuple[str, str]]:
    """(where, expression) of every panel."""
    found = []
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            found += [(f"{path.stem}: {panel['title']}", target["expr"]) for target in panel["targets"]]
    return found


def unknown_names(expression: str) -> set[str]:
    return set(OURS.findall(expression)) - KNOWN


def run_promtool(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(prometheus_tool("promtool")), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def with_unit_tests(folder: Path, rules: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(UNIT_TESTS, folder)
    (folder / "rules.yaml").write_text(rules)
    return run_promtool("test", "rules", UNIT_TESTS.name, folder=folder)


def test_promtool_takes_the_rules_and_their_tests_pass(tmp_path: Path) -> None:
    checked = run_promtool("check", "rules", str(RULES), folder=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = with_unit_tests(tmp_path, RULES.read_text())
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("tandem_worker_orphaned_blocks > 0", "tandem_worker_orphaned_blocks > 3"),  # stays silent
        ("vllm:kv_cache_usage_perc > 0.95", "vllm:kv_cache_usage_perc > 0.85"),  # fires without need
        ('outcome!="bad_request"', 'outcome!="cancelled"'),  # callers' faults dilute ours
        ('objective="ttft", band="interactive"}', 'objective="ttft"}'),  # late batch work wakes somebody
        ("max by (namespace, role)", "sum by (namespace, role)"),  # each router counts every death
        ("(tandem_worker_price_per_hour) / 3600", "(tandem_worker_price_per_hour) / 60"),  # a price per minute
    ],
)
def test_the_unit_tests_find_a_wrong_rule(right: str, wrong: str, tmp_path: Path) -> None:
    text = RULES.read_text()
    assert right in text
    assert with_unit_tests(tmp_path, text.replace(right, wrong)).returncode != 0


def test_every_alert_is_seen_firing_and_silent() -> None:
    tests = [test for case in yaml.safe_load(UNIT_TESTS.read_text())["tests"] for test in case["alert_rule_test"]]
    firing = {test["alertname"] for test in tests if test.get("exp_alerts")}
    silent = {test["alertname"] for test in tests if not test.get("exp_alerts")}
    names = {rule["alert"] for rule in ALERTS}
    assert firing == names
    assert silent == names


def records_that_nothing_reads(expressions: list[str]) -> set[str]:
    read = {name for expression in expressions for name in OURS.findall(expression)}
    return {rule["record"] for rule in ALL_RULES if "record" in rule} - read


def test_every_record_is_read_by_a_dashboard_or_an_alert() -> None:
    panels = [expression for _, expression in dashboard_expressions()]
    assert records_that_nothing_reads([*panels, *(rule["expr"] for rule in ALERTS)]) == set()
    assert "tandem:goodput:rate5m" in records_that_nothing_reads([rule["expr"] for rule in ALERTS])


def test_every_alert_has_its_runbook_and_every_runbook_its_alert() -> None:
    for rule in ALERTS:
        assert rule["annotations"]["runbook"] == f"docs/runbooks/{rule['alert']}.md"
    pages = {path.stem for path in (ROOT / "docs" / "runbooks").glob("*.md")}
    assert pages == {rule["alert"] for rule in ALERTS}


def test_every_expression_names_what_we_export() -> None:
    expressions = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in ALL_RULES] + dashboard_expressions()
    assert len(expressions) > 60
    for where, expression in expressions:
        assert OURS.findall(expression), where
        assert unknown_names(expression) == set(), where


def test_a_name_that_we_do_not_export_is_found() -> None:
    """The positive control of the test above."""
    assert unknown_names("rate(tandem_ttft_seconds_total[5m])") == {"tandem_ttft_seconds_total"}


def test_every_metric_is_in_a_dashboard() -> None:
    """But those that repeat one of ours under the model-server protocol's name, and sizes of single pushes."""
    shown = {name for _, expression in dashboard_expressions() for name in OURS.findall(expression)}
    by_rules = {name for rule in ALL_RULES if rule.get("record") in shown for name in OURS.findall(rule["expr"])}
    families = {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in KNOWN if name.startswith("tandem_")}
    seen = {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in shown | by_rules}
    assert families - seen == {"tandem_kv_bytes_moved", "tandem_kv_transfer_push_bytes"}


def test_dashboards_parse_as_promql(tmp_path: Path) -> None:
    """As rules, which promtool reads; Grafana's variables get values first."""
    rules = []
    for number, (_, expression) in enumerate(dashboard_expressions()):
        text = expression.replace("$__rate_interval", "5m").replace("$namespace", "prod")
        rules.append({"record": f"panel:{number}", "expr": text})
    for text, is_right in (
        (rules, True),
        ([*rules, {"record": "x", "expr": "rate(tandem_ttft_seconds_bucket)"}], False),
    ):
        (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": text}]}))
        checked = run_promtool("check", "rules", "panels.yaml", folder=tmp_path)
        assert (checked.returncode == 0) is is_right, checked.stdout + checked.stderr


def test_panels_have_titles_units_and_their_own_place() -> None:
    for path in DASHBOARDS:
        panels = json.loads(path.read_text())["panels"]
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
        assert len(set(places)) == len(panels)
        for panel in panels:
            assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]


def test_the_chart_carries_rules_and_dashboards() -> None:
    objects = render({"monitoring": {"rules": {"enabled": True}, "dashboards": {"enabled": True}}})
    (rule,) = [item for item in objects if item["kind"] == "PrometheusRule"]
    assert rule["spec"]["groups"] == GROUPS
    data = [item["data"] for item in objects if item["metadata"]["labels"].get("grafana_dashboard") == "1"]
    assert {name: text for item in data for name, text in item.items()} == {
        path.name: path.read_text() for path in DASHBOARDS
    }
    # Grafana's sidecar writes those of all releases and charts into one folder, by these names.
    assert all(name.startswith("tandem-") for item in data for name in item)
