"""What `tandem up` does before it says that it works: the same prompts, prefilled on the prefill worker and on the
decode worker, must give the same tokens; the KV must really have moved; and no block may stay behind.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from tandem.v1 import worker_pb2

from cluster.api_key import key_headers
from cluster.completion import PROMPT, completion
from cluster.status_client import fetch_status
from core.errors import CommandFailed

MAX_TOKENS: Final = 32
REQUEST_TIMEOUT_S: Final = 120.0
SETTLE_TIMEOUT_S: Final = 15.0  # longer than a hand-off lease: what is then held is lost
POLL_S: Final = 0.05
REPORT_PERIOD_S: Final = 1.1  # an idle worker reports its load once a second: a zero must outlive an old report

SHORT: Final = (PROMPT, "def fibonacci(n):\n    ")
LINES: Final = tuple(f"{number}. Prefill computes a prompt; decode continues it.\n" for number in range(1, 41))


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion, as far as the check reads it."""

    token_ids: tuple[int, ...]
    kv_blocks_moved: int
    kv_bytes_moved: int


@dataclass(frozen=True, slots=True)
class Parity:
    """What the check found."""

    equal_tokens: int
    total_tokens: int
    kv_blocks: int
    kv_bytes: int
    block_bytes: int
    lane: str
    orphaned_blocks: int

    @property
    def line(self) -> str:
        """The line to print; its first words are true only when `fault` is empty."""
        sign = "==" if self.equal_tokens == self.total_tokens else "!="
        return (
            f"parity: aggregated {sign} disaggregated ({self.equal_tokens}/{self.total_tokens} tokens), "
            f"KV moved {self.kv_bytes / 2**20:.1f} MiB by NIXL/{self.lane}, "
            f"{self.orphaned_blocks} orphaned blocks"
        )

    @property
    def fault(self) -> str:
        """What is wrong, or empty."""
        if not 0 < self.total_tokens == self.equal_tokens:
            return "the tokens differ"
        if self.kv_bytes <= 0:
            return "no KV moved"
        if self.kv_bytes != self.kv_blocks * self.block_bytes:
            return f"{self.kv_blocks} blocks of {self.block_bytes} bytes moved, but {self.kv_bytes} bytes were counted"
        return "blocks stayed behind" if self.orphaned_blocks else ""


async def check_parity(http_url: str, registry_address: str, model: str) -> Parity:
    """Run the check. Raises: CommandFailed, its message starting with the parity line where it came so far."""
    workers = [item.worker for item in (await fetch_status(registry_address)).workers]
    prompts = prompts_within(min(min(it.max_context_tokens, it.num_blocks * it.block_size) for it in workers))
    async with _session() as session:
        local = await asyncio.gather(*(_complete(session, http_url, model, text, "local") for text in prompts))
        remote = await asyncio.gather(*(_complete(session, http_url, model, text, "remote") for text in prompts))
    orphaned_blocks = await settled_blocks(registry_address)
    status = await fetch_status(registry_address)
    pairs = [pair for one, other in zip(local, remote, strict=True) for pair in _side_by_side(one, other)]
    parity = Parity(
        equal_tokens=sum(one == other for one, other in pairs),
        total_tokens=len(pairs),
        kv_blocks=sum(answer.kv_blocks_moved for answer in remote),
        kv_bytes=sum(answer.kv_bytes_moved for answer in remote),
        block_bytes=next(item.worker.block_bytes for item in status.workers),
        lane=_lane(status),
        orphaned_blocks=orphaned_blocks,
    )
    if parity.fault:
        raise CommandFailed(f"{parity.line}: {parity.fault}")
    return parity


def prompts_within(context_tokens: int) -> tuple[str, ...]:
    """Two short ones, and one of 600 tokens, or of the lines that are sure to fit: no token has less than a byte."""
    num_bytes = list(itertools.accumulate(len(line.encode()) for line in LINES))
    long = "".join(LINES[: bisect_right(num_bytes, context_tokens - MAX_TOKENS - 1)])  # 1: a first token of the model's
    return (*SHORT, long) if long else SHORT


async def check_request(http_url: str, model: str, max_tokens: int = MAX_TOKENS) -> None:
    """One request by the router's own choice. Raises: CommandFailed."""
    async with _session() as session:
        answer = await _complete(session, http_url, model, PROMPT, "auto", max_tokens)
    if not answer.token_ids:
        raise CommandFailed("a request gave no tokens")


async def _complete(
    session: aiohttp.ClientSession, http_url: str, model: str, prompt: str, prefill: str, max_tokens: int = MAX_TOKENS
) -> Completion:
    """One greedy completion. Raises: CommandFailed."""
    async with completion(session, http_url, model, prompt, prefill, max_tokens) as response:
        return _read_completion(await response.json())


async def settled_blocks(registry_address: str) -> int:
    """Blocks that workers still hold or keep in quarantine once nothing runs: 0 unless some were lost."""
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    zero_since_s: float | None = None
    while True:
        status = await fetch_status(registry_address)
        held: int = sum(item.load.used_blocks + item.load.quarantined_blocks for item in status.workers)
        now_s = time.monotonic()
        if held or status.open_requests:
            zero_since_s = None
        elif zero_since_s is None:
            zero_since_s = now_s
        elif now_s - zero_since_s > REPORT_PERIOD_S:
            return 0
        if now_s > deadline_s:
            return held
        await asyncio.sleep(POLL_S)


def _lane(status: worker_pb2.GetStatusResponse) -> str:
    """The lane that the workers' probes found (kv_transfer/nixl_probe.py); several if they differ."""
    lanes = {peer.lane for item in status.workers for peer in item.peers}
    return "+".join(sorted(lanes)) or "unknown"


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers=key_headers(), timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S))


def _read_completion(reply: dict[str, Any]) -> Completion:
    try:
        moved = reply["usage"].get("tandem", {})
        return Completion(
            token_ids=tuple(reply["choices"][0]["token_ids"]),
            kv_blocks_moved=int(moved.get("kv_blocks_moved", 0)),
            kv_bytes_moved=int(moved.get("kv_bytes_moved", 0)),
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CommandFailed(f"the reply lacks {error}: {str(reply)[:500]}") from error


def _side_by_side(one: Completion, other: Completion) -> list[tuple[int | None, int | None]]:
    """Tokens by position; a missing one counts as different."""
    length = max(len(one.token_ids), len(other.token_ids))
    padded = [[*answer.token_ids, *[None] * (length - len(answer.token_ids))] for answer in (one, other)]
    return list(zip(*padded, strict=True))
