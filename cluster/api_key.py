"""The API key of `tandem chat`, `tandem drill` and the check of `tandem up`, where the policy file asks for one."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Final

VARIABLE: Final = "TANDEM_API_KEY"
MAX_CHARS: Final = 500  # of what is no answer of ours


def key_headers() -> dict[str, str]:
    """The header with the key of the environment; none without one."""
    key = os.environ.get(VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def refusal(status: int, body: str) -> str:
    """An answer of the HTTP front that is none, in a line: its own message where it has one, and where the key comes
    from, if it is about that."""
    text = " ".join(body[:MAX_CHARS].split())
    with contextlib.suppress(ValueError, TypeError, LookupError):
        text = str(json.loads(body)["error"]["message"])
    if status == 401:
        text += f"; {VARIABLE} in the environment is {'another one' if key_headers() else 'not set'}"
    return f"HTTP {status}: {text}"
