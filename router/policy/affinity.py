"""Which worker a session prefers: by rendezvous hashing, so that every router says the same and nothing is kept.

A worker that leaves moves its own sessions only. A place keeps its sessions over a restart.
Source: D. Thaler, C. Ravishankar, "A name-based mapping scheme for rendezvous", 1996.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

_BITS: Final = (1 << 64) - 1
_MIX: Final = 0x9E3779B97F4A7C15  # odd, its bits far from regular: 2**64 over the golden ratio


def session_key(tenant: str, session_id: str) -> int:
    return _key(f"{len(tenant)}:{tenant}{session_id}")


def place_key(worker_id: str) -> int:
    return _key(worker_id)


def own_place(session: int, places: Sequence[int]) -> int:
    """Index of the session's own place."""
    ranks = [(session ^ place) * _MIX & _BITS for place in places]
    return ranks.index(max(ranks))


def _key(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
