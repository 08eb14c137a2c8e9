"""The golden greedy continuations of the default model (tests/golden, made by transformers in float32)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOLDEN_FILE = Path(__file__).parent.parent / "golden" / "smollm2_135m_greedy.json"


def golden_cases() -> list[dict[str, Any]]:
    """Each with `name`, `text` or `messages`, `prompt_ids`, `output_ids` and `output_text`."""
    cases: list[dict[str, Any]] = json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))["cases"]
    return cases
