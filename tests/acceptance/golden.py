"""The exact greedy tokens of the default model in float32 (tests/golden/README.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "golden" / "smollm2_135m_greedy.json"


@dataclass(frozen=True, slots=True)
class GoldenCase:
    name: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish_reason: str
    output_text: str
    messages: tuple[dict[str, Any], ...]


def load_cases() -> list[GoldenCase]:
    cases = json.loads(FILE.read_text())["cases"]
    return [
        GoldenCase(
            case["name"], tuple(case["prompt_ids"]), tuple(case["output_ids"]), case["finish_reason"],
            case["output_text"], tuple(case.get("messages", ())),
        )
        for case in cases
    ]  # fmt: skip


CASES = load_cases()
MAX_TOKENS = 64
