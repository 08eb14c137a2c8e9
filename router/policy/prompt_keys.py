"""The routing keys of a prompt, as workers hash it (core/identity.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from core.identity import block_hashes, namespace, pack_keys, unpack_keys
from core.membership import WorkerInfo
from core.request import GenerateRequest

BLOCKS_AT_ONCE: Final = 256  # well below 1 ms


def prompt_keys(request: GenerateRequest, info: WorkerInfo) -> Iterator[tuple[int, ...]]:
    """Keys of the blocks of its prompt that a hit may cover, a bounded piece at a time; `info`: of any worker.

    One token is always computed, so a block that ends the prompt is none of them; a prompt whose log probabilities are
    asked for is computed whole.
    """
    if request.prompt_logprobs is not None:
        return
    parent = namespace(info.identity_digest, request.tenant, request.cache_salt, request.adapter)
    block_size = info.block_size
    num_tokens = request.num_prompt_tokens - 1
    for start in range(0, num_tokens - block_size + 1, BLOCKS_AT_ONCE * block_size):
        piece = request.prompt_token_ids[start : min(num_tokens, start + BLOCKS_AT_ONCE * block_size)]
        hashes = block_hashes(parent, piece, block_size)
        parent = hashes[-1]
        yield unpack_keys(pack_keys(hashes))
