"""A number of bytes as people write it: 8589934592, 8GiB, "512 MB"."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from core.errors import BadRequest

ACCEPTED: Final = "bytes, or KB, MB, GB, TB (of 1000), or KiB, MiB, GiB, TiB (of 1024), such as 8GiB"

_SIZE: Final = re.compile(r"([0-9]{1,18}(?P<part>\.[0-9]{1,9})?)\s*(B|(?P<step>[KMGT])(?P<binary>i)?B)?", re.I)


def read_byte_size(name: str, text: str) -> int:
    """In bytes; a part of a byte is dropped. Raises: BadRequest: on `name`: it is no size."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found["part"] and not found["step"]):
        raise BadRequest(name, f"must be a number of {ACCEPTED}, got {text!r}")
    step = "kmgt".index(found["step"].lower()) + 1 if found["step"] else 0
    return int(Decimal(found[1]) * (1024 if found["binary"] else 1000) ** step)
