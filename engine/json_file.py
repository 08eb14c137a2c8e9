"""Reads the JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from core.errors import BadModel


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises: BadModel: it cannot be read or holds something else."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadModel(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise BadModel(f"{path}: must hold a JSON object")
    return loaded
