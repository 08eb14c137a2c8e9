"""Reads the bytes of an OpenAI request. What is wrong is named by the path that the caller would use."""

from __future__ import annotations

import json
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from core.errors import BadRequest
from router.front.openai_schema import Body
from router.strict import first_complaint

BODY: Final = "body"
BodyType = TypeVar("BodyType", bound=Body)


def parse_body(raw: bytes, kind: type[BodyType]) -> BodyType:
    """Read a request body. Raises: BadRequest: naming the field, or `body` when it is not JSON at all."""
    fields = _decode(raw)
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise first_complaint(error, BODY) from error
    body.require_consistent()
    return body


def _decode(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_once_each)
    except UnicodeDecodeError as error:
        raise BadRequest(BODY, f"is not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise BadRequest(BODY, f"is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from error
    except (RecursionError, ValueError) as error:
        raise BadRequest(BODY, "nests too deep or holds a number with too many digits") from error
    if not isinstance(value, dict):
        raise BadRequest(BODY, "must be a JSON object")
    return value


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a field that stands twice a proxy may have looked at the other one."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _value in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRequest(twice or BODY, "stands twice in one object")
    return fields
