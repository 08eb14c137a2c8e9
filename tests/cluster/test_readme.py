"""README's tables are whole: each flag, field and public series stands there, and nothing that is none."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path

from cluster.commands import up
from cluster.config import ClusterConfig
from tests.telemetry.test_metrics import ROUTER_FAMILIES, TRACE_FAMILIES, WORKER_FAMILIES

README = (Path(__file__).parents[2] / "README.md").read_text()


def section(name: str) -> str:
    return README.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def up_flags() -> dict[str, str]:
    """Each long flag of `tandem up`, and the field that it sets."""
    commands = argparse.ArgumentParser().add_subparsers()
    up.add_parser(commands)
    return {flag: action.dest for action in commands.choices["up"]._actions for flag in action.option_strings}


def test_flags_and_fields() -> None:
    flags, text = up_flags(), section("Configuration")
    named = set(re.findall(r"`(--[a-z-]+)", text))
    assert named == {flag for flag in flags if flag.startswith("--") and flag != "--help"}
    rows = set(re.findall(r"`([a-z_]+)`", text))
    assert {item.name for item in fields(ClusterConfig)} <= rows | {flags[flag] for flag in named}


def test_metrics() -> None:
    named = {name.removesuffix("_total") for name in re.findall(r"`((?:tandem_|vllm:)[a-z0-9_]+)", section("Metrics"))}
    assert named == ROUTER_FAMILIES | TRACE_FAMILIES | WORKER_FAMILIES
