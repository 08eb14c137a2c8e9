"""Logs: one line per change of state, as key=value pairs that grep and a log store read alike."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Final, TextIO

_QUOTED: Final = frozenset(' "=\\')
_OWN_HANDLER: Final = "tandem"


class KeyValueFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO router router.live request_id=... state=planned`, UTC, always one line."""

    def __init__(self, component: str) -> None:
        super().__init__(datefmt="%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text += " " + pairs(traceback=self.formatException(record.exc_info))
        if "\n" in text or "\r" in text:
            text = json.dumps(text)
        moment = f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}Z"
        return f"{moment} {record.levelname} {self._component} {record.name} {text}"


def setup_logs(component: str, level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send every log of this process to `stream` (stderr), one line each. Calling it again replaces the set-up.

    Args:
        component: who speaks: "router", "prefill-0".
        level: name of the lowest level that is written.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.set_name(_OWN_HANDLER)
    handler.setFormatter(KeyValueFormatter(component))
    root = logging.getLogger()
    for old in [item for item in root.handlers if item.get_name() == _OWN_HANDLER]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())


def log_state(logger: logging.Logger, level: int = logging.INFO, **fields: object) -> None:
    """Write one change of state; fields that are None are left out."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", pairs(**fields))


def pairs(**fields: object) -> str:
    """`key=value` pairs in the order given; values with spaces, quotes or control characters are JSON strings."""
    return " ".join(f"{name}={_value(value)}" for name, value in fields.items() if value is not None)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if text and text.isprintable() and not _QUOTED.intersection(text):
        return text
    return json.dumps(text)
