"""One line per record, whatever is in it."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from telemetry.logs import log_state, pairs, setup_logs

logger = logging.getLogger("tandem.test")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    setup_logs("first", "DEBUG", io.StringIO())
    setup_logs("router", "INFO", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_change_of_state_is_one_line(stream: io.StringIO) -> None:
    log_state(logger, state="ended", request_id="r1", reason=None, ttft_s=0.123456789, message='a "b"\nc')
    log_state(logger, level=logging.DEBUG, state="hidden")
    (line,) = stream.getvalue().splitlines()
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO router tandem\.test state=ended ", line)
    assert line.endswith('state=ended request_id=r1 ttft_s=0.123457 message="a \\"b\\"\\nc"')


def test_a_traceback_is_one_line(stream: io.StringIO) -> None:
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logger.exception("state=failed")
    (line,) = stream.getvalue().splitlines()
    assert "state=failed traceback=" in line
    assert "RuntimeError: broken" in line


def test_a_foreign_message_with_line_breaks_is_one_line(stream: io.StringIO) -> None:
    logger.warning("two\nlines")
    assert stream.getvalue().endswith('"two\\nlines"\n')


def test_an_empty_value_is_visible() -> None:
    assert pairs(a="", b=0, c=None, d=False) == 'a="" b=0 d=False'
