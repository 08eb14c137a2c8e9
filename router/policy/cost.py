"""What it costs to serve a request on given workers, in tokens: 1 is a prompt token computed by a worker of usual pace.

Prefill and decode are chosen together, as the KV that the decode worker lacks has to move from the one to the other.
The terms are added up; each is zero or more, except affinity, which is taken off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from core.blocks import MIN_FETCHED_BLOCKS
from core.membership import WorkerRef
from router.policy.candidates import Candidate
from router.policy.routing_policy import RoutingPolicy
from router.policy.topology import Nearness, nearness
from router.policy.transfer import FIRST_SHARE

HOMELESS_COST: Final = 10.0  # of a token for which the decode worker's KV pool has no room now


@dataclass(frozen=True, slots=True)
class Score:
    """One way to serve the request. `prefill` None: the decode worker computes the prompt.

    work: prompts to compute there before this one. uncached: what that worker has to compute of this one, or get from
    a peer. transfer: KV that has to move to the decode worker; path: how near that is, None where nothing moves.
    occupancy: of the decode worker's KV pool by open requests. affinity: of the request's session to these workers.
    Of the prompt's tokens, not weighed: hit_tokens are cached where it is computed, fetched_tokens at a peer, the
    others are computed.
    """

    decode: WorkerRef
    prefill: WorkerRef | None
    work: float
    uncached: float
    transfer: float
    path: Nearness | None
    occupancy: float
    affinity: float
    hit_tokens: int
    fetched_tokens: int
    computed_tokens: int

    def __str__(self) -> str:
        where = self.decode.worker_id if self.prefill is None else f"{self.prefill.worker_id}>{self.decode.worker_id}"
        return (
            f"{where} {self.total:.0f} = work {self.work:.0f} + uncached {self.uncached:.0f}"
            f" + transfer {self.transfer:.0f}{'' if self.path is None else f' ({self.path})'}"
            f" + occupancy {self.occupancy:.0f} - affinity {self.affinity:.0f}"
        )

    @property
    def total(self) -> float:
        return self.work + self.uncached + self.transfer + self.occupancy - self.affinity


@dataclass(frozen=True, slots=True)
class CostModel:
    """For one request of `num_tokens` tokens.

    block_cost: of moving one block at 1 gigabyte/s; 0 while no pace is known to compare it with.
    longest_blocks: the longest run of the prompt that anybody can push, and so has on the device; holder: slot of one.
    exposed: share of a transfer that its request waits for, by lane (router/policy/transfer.py).
    """

    policy: RoutingPolicy
    num_tokens: int
    block_size: int
    block_cost: float
    longest_blocks: int = 0
    holder: int = 0
    exposed: Mapping[str, float] = field(default_factory=dict)

    def cheapest_local(self, decodes: Sequence[Candidate], cost: float) -> Score:
        """Computing the prompt beside a decode worker's streams; a token costs `cost`. The first among equals."""

        def total(decode: Candidate) -> float:
            return sum(self._local(decode, cost)) + self._rest(decode)

        decode = min(decodes, key=total)
        work, uncached = self._local(decode, cost)
        return self._score(decode, None, work, uncached)

    def cheapest_remote(self, decodes: Sequence[Candidate], prefills: Sequence[Candidate]) -> Score | None:
        """Over all pairs with a warm path; among equals the nearest, then the first."""
        alone = [(prefill, prefill.worker.slot, self._remote(prefill)) for prefill in prefills]
        best_cost, best, exposed = math.inf, None, self.exposed
        for decode in decodes:
            links, lanes, rest, moved = (
                decode.worker.links,
                decode.worker.lanes,
                self._rest(decode),
                self._moved(decode),
            )
            for prefill, slot, cost in alone:
                gbps = links.get(slot)
                if gbps is None:
                    continue
                transfer = moved * exposed.get(lanes[slot], FIRST_SHARE) / gbps
                total = cost + rest + transfer
                if total < best_cost or (
                    total == best_cost and best is not None and _path(decode, prefill) > _path(*best[:2])
                ):
                    best_cost, best = total, (decode, prefill, transfer)
        if best is None:
            return None
        decode, prefill, transfer = best
        uncached, fetched_tokens = self._prompt_on(prefill)
        return self._score(decode, prefill, self._queued(prefill), uncached, transfer, fetched_tokens)

    def _score(
        self,
        decode: Candidate,
        prefill: Candidate | None,
        work: float,
        uncached: float,
        transfer: float = 0.0,
        fetched_tokens: int = 0,
    ) -> Score:
        prefiller = prefill or decode
        hit_tokens = prefiller.hit_blocks * self.block_size
        return Score(
            decode=decode.worker.ref,
            prefill=None if prefill is None else prefill.worker.ref,
            work=work,
            uncached=uncached,
            transfer=transfer,
            path=None if prefill is None else _path(decode, prefill),
            occupancy=self._occupancy(decode),
            affinity=decode.affinity_tokens + (0.0 if prefill is None else prefill.affinity_tokens),
            hit_tokens=hit_tokens,
            fetched_tokens=fetched_tokens,
            computed_tokens=self.num_tokens - hit_tokens - fetched_tokens,
        )

    def _local(self, decode: Candidate, cost: float) -> tuple[float, float]:
        """What comes before the prompt on a decode worker, and what is left of the prompt itself."""
        cost *= decode.slowness
        return decode.worker.prompt_tokens * cost, (self.num_tokens - self._saved(decode)) * cost

    def _saved(self, candidate: Candidate) -> float:
        """Tokens that its hits save, each block weighed by its tier: it has to be copied to the device first."""
        policy, on_host, on_disk = self.policy, candidate.host_blocks, candidate.disk_blocks
        weight = (candidate.hit_blocks - on_host - on_disk) * policy.overlap_weight
        if on_host or on_disk:
            weight += on_host * policy.host_overlap_weight + on_disk * policy.disk_overlap_weight
        return weight * self.block_size

    def _remote(self, prefill: Candidate) -> float:
        return self._queued(prefill) + self._prompt_on(prefill)[0] - prefill.affinity_tokens

    def _queued(self, prefill: Candidate) -> float:
        return prefill.worker.prompt_tokens * prefill.slowness

    def _prompt_on(self, prefill: Candidate) -> tuple[float, int]:
        """What the prompt costs a prefill worker, and how many tokens of a longer run that a connected peer caches are
        pushed to it, where that is cheaper than computing them."""
        slowness = prefill.slowness
        cost = (self.num_tokens - self._saved(prefill)) * slowness
        num_blocks = self.longest_blocks - prefill.hit_blocks
        gbps = prefill.worker.links.get(self.holder)
        if num_blocks >= MIN_FETCHED_BLOCKS and gbps:
            fetched_tokens = num_blocks * self.block_size
            gain = fetched_tokens * self.policy.overlap_weight * slowness - num_blocks * self.block_cost / gbps
            if gain > 0.0:
                return cost - gain, fetched_tokens
        return cost, 0

    def _moved(self, decode: Candidate) -> float:
        """What the KV that a decode worker lacks costs on a path of 1 gigabyte/s, if nothing of that is hidden."""
        num_blocks = -(-self.num_tokens // self.block_size) - decode.hit_blocks
        return num_blocks * self.block_cost * self.policy.transfer_weight

    def _rest(self, decode: Candidate) -> float:
        return self._occupancy(decode) - decode.affinity_tokens

    def _occupancy(self, decode: Candidate) -> float:
        """What finds no room waits for others to end."""
        worker = decode.worker
        hit_tokens = decode.hit_blocks * self.block_size
        homeless = worker.kv_tokens + self.num_tokens - hit_tokens - worker.capacity_tokens
        return worker.kv_tokens * self.policy.kv_token_cost + max(0, homeless) * HOMELESS_COST


def _path(decode: Candidate, prefill: Candidate) -> Nearness:
    return nearness(decode.worker.info, prefill.worker.info)
