"""Under which exact identity a cached block may be found (DESIGN section 5).

A block's hash is SHA-256 over canonical, tagged fields: the parent's hash, the block's token ids and a
namespace derived from the identity digest, tenant and cache salt. Two processes with different
PYTHONHASHSEED agree, and a hit across weights, tokenizers, layouts, tenants or salts is impossible.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Final, NewType

from core.errors import PeerRefused

BlockHash = NewType("BlockHash", bytes)  # 32 bytes

SCHEMA_REVISION: Final = 2  # raise it whenever a hand-off message or the meaning of a hash changes


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """Everything that two workers must share before a byte of KV passes between them.

    `numeric_class` names kernel path and CPU or GPU kind: where it differs, outputs may differ in the
    last bit, so workers of different classes are not paired either.
    """

    schema_revision: int
    weights_digest: str
    tokenizer_digest: str
    kv_dtype: str
    kv_layout: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tensor_parallel_size: int
    numeric_class: str

    def digest(self) -> bytes:
        """32 bytes, equal in every process that holds the same fields."""
        return _tagged_sha256("identity", *(f"{name}={value}".encode() for name, value in asdict(self).items()))

    def require_equal(self, other: CacheIdentity) -> None:
        """Raise PeerRefused naming the first field in which the two differ."""
        for item in fields(self):
            ours, theirs = getattr(self, item.name), getattr(other, item.name)
            if ours != theirs:
                raise PeerRefused(item.name, ours, theirs)


def namespace(identity_digest: bytes, tenant: str, cache_salt: str) -> bytes:
    """The root that every chain of block hashes of one tenant and salt starts from, 32 bytes."""
    return _tagged_sha256("namespace", identity_digest, tenant.encode(), cache_salt.encode())


def block_hashes(root: bytes, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Chained hashes of the full blocks of `token_ids`; a trailing partial block has none."""
    return list(extend_hashes(root, (), token_ids, block_size))


def extend_hashes(
    root: bytes, known: Sequence[BlockHash], token_ids: Sequence[int], block_size: int
) -> Iterator[BlockHash]:
    """Hashes of the full blocks after the first `len(known)`, whose hashes are already known."""
    parent: bytes = known[-1] if known else root
    for start in range(len(known) * block_size, len(token_ids) - block_size + 1, block_size):
        block = token_ids[start : start + block_size]
        parent = _tagged_sha256("block", parent, struct.pack(f"<{block_size}I", *block))
        yield BlockHash(parent)


def _tagged_sha256(tag: str, *parts: bytes) -> bytes:
    """SHA-256 of a tag and length-prefixed parts, so that no two different inputs share an encoding."""
    digest = hashlib.sha256()
    for part in (tag.encode(), *parts):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return digest.digest()
