"""What a request cost, added up from what its workers report."""

from __future__ import annotations

from dataclasses import dataclass

from core.request import WorkUsage


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of one request so far.

    cached_tokens: prompt tokens that no worker had to compute: found in a worker's cache, or pushed by a holder.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    fetched_tokens: int = 0
    computed_tokens: int = 0
    kv_blocks_moved: int = 0
    kv_bytes_moved: int = 0


class UsageSum:
    """Adds up the work of every worker that had a part in one request."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._found_tokens = 0
        self._fetched_tokens = 0
        self._computed_tokens = 0
        self._kv_blocks = 0
        self._kv_bytes = 0

    def add(self, num_tokens: int, work: WorkUsage | None) -> None:
        """Count new output tokens, and a worker's report where there is one."""
        self._completion_tokens += num_tokens
        if work is None:
            return
        self._found_tokens += work.cached_tokens + work.fetched_tokens
        self._fetched_tokens += work.fetched_tokens
        self._computed_tokens += work.computed_tokens
        self._kv_blocks += work.kv_blocks_received
        self._kv_bytes += work.kv_bytes_received

    def total(self) -> Usage:
        """Counts so far. Both workers of a hand-off may hold the same prefix, so what they found is bounded by
        what nobody computed: a token that one found and the other computed was not saved."""
        not_computed = max(0, self._prompt_tokens - self._computed_tokens)
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=min(self._found_tokens, not_computed),
            fetched_tokens=self._fetched_tokens,
            computed_tokens=self._computed_tokens,
            kv_blocks_moved=self._kv_blocks,
            kv_bytes_moved=self._kv_bytes,
        )
