"""The base of every body that we read: wrong types and unknown fields are errors."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


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
