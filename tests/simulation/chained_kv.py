"""KV in small, and what a request says that runs alone: the measure of every simulated cluster and every soak."""

from __future__ import annotations

from collections.abc import Callable

from core.identity import Adapter
from core.request import GenerateRequest
from engine.block_pool import BlockPool
from engine.sequence import ModelLimits
from engine.step import SequenceSlice
from tests.engine.token_memory import TokenMemory, next_token, seed_of

BLOCK_SIZE = 4
NUM_BLOCKS = 24
ADAPTER = Adapter("poet", "d1")  # that every worker has
LIMITS = ModelLimits(BLOCK_SIZE, max_context_tokens=64, eos_token_ids=tuple(range(20)))


class WriteIntoForeignBlock(Exception):
    """Bytes reached a page that was not locked for their hand-off, or a step a block that nobody holds."""


class ChainMemory(TokenMemory):
    """A slot holds a digest of salt, adapter and all tokens up to its own, as real KV depends on all of them."""

    def __init__(self, pool: BlockPool, salt_of: Callable[[str], str]) -> None:
        super().__init__(pool, BLOCK_SIZE)
        self._salt_of = salt_of

    def _write(self, item: SequenceSlice) -> None:
        before = self._before(item)
        for position, token in enumerate(item.token_ids, item.start):
            before = self.slots[self._slot(item, position)] = chained(before, token)

    def _before(self, item: SequenceSlice) -> int:
        if item.start == 0:
            return salted(self._salt_of(item.request_id) + item.adapter_digest)
        return self.slots.get(self._slot(item, item.start - 1), -1) & 0xFFFFFFFF


def salted(salt: str) -> int:
    return next_token([*salt.encode()])


def chained(before: int, token: int) -> int:
    return (before * 1_000_003 + token * 7919 + 17) % (1 << 32)


def undisturbed(request: GenerateRequest, choice: int = 0) -> list[int]:
    """The output of a choice of a request that runs alone."""
    slots: list[int] = []
    seed = seed_of(request.sampling.for_choice(choice))
    output: list[int] = []
    before = salted(request.cache_salt + (request.adapter.digest if request.adapter else ""))
    for token in request.prompt_token_ids:
        before = chained(before, token)
        slots.append(before)
    while True:
        output.append(next_token(slots, seed))
        known = request.num_prompt_tokens + len(output)
        if output[-1] in LIMITS.eos_token_ids or len(output) == request.stop.max_tokens or known == 64:
            return output
        before = chained(before, output[-1])
        slots.append(before)
