"""The base of everything that we read from outside: wrong types and unknown fields are errors, by their path."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from core.errors import BadRequest

# pydantic puts a union's tag (of front/openai_schema.py), and "[key]" where a map's key is wrong, into the path: no
# caller wrote them.
_TAGS: Final = frozenset({"<text>", "<list>", "[key]"})
_MESSAGES: Final = {
    "extra_forbidden": "is not a known field",
    "missing": "is required",
    "union_tag_not_found": "must be a string or a list",
}


def _valid_unicode(text: str) -> str:
    """JSON can spell half a surrogate pair, which is not text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("surrogate", "must be valid Unicode: it holds an unpaired surrogate") from error
    return text


Text = Annotated[str, AfterValidator(_valid_unicode)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


def first_complaint(error: ValidationError, whole: str) -> BadRequest:
    """What is wrong first, under the path that its writer would use; `whole` names what has no path."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = [str(part) for part in first["loc"] if part not in _TAGS]
    message = _MESSAGES.get(first["type"], first["msg"])
    code = "unsupported_value" if first["type"] == "not_supported" else None
    return BadRequest(".".join(path) or whole, message, code)
