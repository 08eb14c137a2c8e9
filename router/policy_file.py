"""The operator's policy file: strict YAML, read at start and again whenever it changes.

A section each for those who decide by it. A file that is wrong, or gone, changes nothing: the last good one holds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

import yaml
from pydantic import ValidationError

from core.errors import BadRequest
from router.admission.policy import AdmissionPolicy
from router.once_loader import OnceLoader
from router.policy.routing_policy import RoutingPolicy
from router.strict import Strict, first_complaint
from telemetry.logs import log_state
from telemetry.router_metrics import PolicyMetrics

logger = logging.getLogger(__name__)

POLICY: Final = "policy"  # what a complaint about the whole file names
MAX_FILE_BYTES: Final = 1 << 20  # as much as a ConfigMap holds; checking that takes 4 s


class Policy(Strict):
    """The whole file."""

    admission: AdmissionPolicy = AdmissionPolicy()
    routing: RoutingPolicy = RoutingPolicy()


def parse_policy(text: str) -> Policy:
    """Raises: BadRequest: naming the path of the first field that is wrong or unknown, or `policy`: it is no YAML, or
    nothing, which is what a full disk leaves of a file: a policy without keys has to be said."""
    try:
        values = yaml.load(text, OnceLoader)
    except Exception as error:  # a tag that does not fit its value ends in whatever its reader trips over
        raise BadRequest(POLICY, f"is not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        raise BadRequest(POLICY, "is empty; a policy that says nothing is {}")
    try:
        return Policy.model_validate(values)
    except ValidationError as error:
        raise first_complaint(error, POLICY) from error


def read_policy(file: Path) -> Policy:
    """Raises: BadRequest: it cannot be read, or as parse_policy."""
    return parse_policy(_contents(file))


async def follow_policy(
    file: Path, apply: Callable[[Policy], None], metrics: PolicyMetrics, interval_s: float = 1.0
) -> None:
    """Apply what the file says each time that this changes; runs until cancelled.

    Its contents are compared: an update of a ConfigMap changes neither its path nor, always, its time. And they must be
    found twice: half of a file that is being written may be a policy too, one without keys.
    """
    known: str | None = None
    last: str | None = None
    while True:
        found = await asyncio.to_thread(_contents_or_complaint, file)
        if str(found) == last != known:
            known = last
            try:
                apply(await _parse(found))
                metrics.applied()
                log_state(logger, state="policy_applied", file=file)
            except BadRequest as error:
                metrics.refused()
                log_state(logger, logging.WARNING, state="policy_refused", file=file, reason=error)
        last = str(found)
        await asyncio.sleep(interval_s)


async def _parse(found: str | BadRequest) -> Policy:
    if isinstance(found, BadRequest):
        raise found
    return await asyncio.to_thread(parse_policy, found)


def _contents_or_complaint(file: Path) -> str | BadRequest:
    try:
        return _contents(file)
    except BadRequest as error:
        return error


def _contents(file: Path) -> str:
    try:
        with open(file, "rb", opener=_open_at_once) as handle:
            if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):  # what is read once only cannot be compared
                raise BadRequest(POLICY, "is no regular file")
            raw = handle.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise BadRequest(POLICY, f"is longer than {MAX_FILE_BYTES} bytes")
        return raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(POLICY, f"cannot be read: {error}") from error


def _open_at_once(file: str, flags: int) -> int:
    """A pipe would be waited for without a bound."""
    return os.open(file, flags | os.O_NONBLOCK)
