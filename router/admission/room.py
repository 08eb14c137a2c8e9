"""How much may be out at the workers, so that they stay busy and the waiting is done here.

What a worker has queued is out of reach: no tenant's turn, no priority and no better choice of workers changes it any
more. So only prompts that the workers are about to compute are sent, a few steps' worth for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Final

from core.membership import Life, Role
from router.view import ClusterView
from router.worker_view import WorkerView

# For each worker one that it computes and one that is next, whatever their length: it never waits for the router.
LEAST_PROMPTS: Final = 2


@dataclass(slots=True)
class PromptsOut:
    """Prompts that workers have and whose first token has not come. num_tokens: of them to compute, as what is cached
    keeps no worker busy. unplaced: those of them for which no decode worker has said yet that it has KV blocks: what it
    says is free does not count them."""

    num_prompts: int = 0
    num_tokens: int = 0
    unplaced_prompts: int = 0
    unplaced_tokens: int = 0

    def begin(self, computed_tokens: int, prompt_tokens: int) -> None:
        self.num_prompts += 1
        self.num_tokens += computed_tokens
        self.unplaced_prompts += 1
        self.unplaced_tokens += prompt_tokens

    def place(self, prompt_tokens: int) -> None:
        """Its KV blocks are reserved."""
        self.unplaced_prompts -= 1
        self.unplaced_tokens -= prompt_tokens

    def end(self, computed_tokens: int, prompt_tokens: int, *, placed: bool) -> None:
        """Its first token is here, or will not come."""
        self.num_prompts -= 1
        self.num_tokens -= computed_tokens
        if not placed:
            self.place(prompt_tokens)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the ready workers can take together. num_workers: that compute prompts; each does, whatever its role.
    num_decodes: of these, those that hold requests to their end. free_tokens: of KV on these, as they last said.
    seconds_per_token: what one worker takes, learnt; None before any has shown it. others_tokens: of prompts under way
    that other routers sent. others_unplaced_tokens: given by others with requests that wait for KV
    blocks."""

    num_workers: int = 0
    num_decodes: int = 0
    free_tokens: int = 0
    seconds_per_token: float | None = None
    others_tokens: int = 0
    others_unplaced_tokens: int = 0

    @classmethod
    def count(cls, view: ClusterView, now: float) -> Capacity:
        ready = [worker for worker in view.workers() if worker.life is Life.READY]
        decodes = [worker for worker in ready if worker.info.role is Role.DECODE]
        usual = {role: view.paces.of_role(role, now) for role in Role}
        paces = [pace for worker in ready if (pace := worker.pace.at(now, usual[worker.info.role]))]
        others_tokens = sum(worker.others.prompt_tokens for worker in ready)
        unplaced = sum(worker.others.unplaced_tokens for worker in decodes)
        pace = fmean(paces) if paces else None
        return cls(len(ready), len(decodes), sum(map(_free_tokens, decodes)), pace, others_tokens, unplaced)

    def has_room(self, out: PromptsOut, tokens_ahead: int) -> bool:
        """Whether another prompt may go to the workers. tokens_ahead: that may be out for each of them."""
        if out.unplaced_tokens + self.others_unplaced_tokens >= self.free_tokens:
            return out.unplaced_prompts < self.num_decodes  # for the next room, at once when it is there
        few = out.num_prompts < LEAST_PROMPTS * self.num_workers
        return few or out.num_tokens + self.others_tokens < tokens_ahead * self.num_workers


def _free_tokens(worker: WorkerView) -> int:
    """All of a worker that has said nothing yet."""
    load = worker.load
    said = load.free_blocks or load.used_blocks or load.quarantined_blocks
    return (load.free_blocks if said else worker.info.num_blocks) * worker.info.block_size
