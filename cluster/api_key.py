"""The API key of `tandem chat`, `tandem drill` and the check of `tandem up`, where the policy file asks for one."""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "TANDEM_API_KEY"


def key_headers() -> dict[str, str]:
    """The header with the key of the environment; none without one."""
    key = os.environ.get(VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}
