"""Under which exact identity a cached block may be found.

A block's hash is SHA-256 over canonical, tagged fields: the parent's hash, the block's token ids and a
namespace derived from the identity digest, tenant and cache salt. Two processes with different
PYTHONHASHSEED agree, and a hit across weights, tokenizers, layouts, tenants or salts is impossible.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Final, NewType

from core.errors import PeerRefused

BlockHash = NewType("BlockHash", bytes)  # 32 bytes

KEY_BYTES: Final = 8  # of a routing key
SCHEMA_REVISION: Final = 3  # raise it whenever a hand-off message or the meaning of a hash changes


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


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as requests and workers speak of it. digest: of its content, hex (engine/digest.py)."""

    name: str
    digest: str


def namespace(identity_digest: bytes, tenant: str, cache_salt: str, adapter: Adapter | None = None) -> bytes:
    """The root that every chain of block hashes of one tenant, salt and adapter starts from, 32 bytes."""
    adapted = () if adapter is None else (adapter.digest.encode(),)  # its name says nothing of what KV holds
    return _tagged_sha256("namespace", identity_digest, tenant.encode(), cache_salt.encode(), *adapted)


def block_hashes(root: bytes, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Chained hashes of the full blocks of `token_ids`; a trailing partial block has none."""
    return list(extend_hashes(root, (), token_ids, block_size))


def extend_hashes(
    root: bytes, known: Sequence[BlockHash], token_ids: Sequence[int], block_size: int
) -> Iterator[BlockHash]:
    """Hashes of the full blocks after the first `len(known)`, whose hashes are already known."""
    parent: bytes = known[-1] if known else root
    before, between = _length(len(b"block")) + b"block" + _length(len(parent)), _length(4 * block_size)
    pack = struct.Struct(f"<{block_size}I").pack
    for start in range(len(known) * block_size, len(token_ids) - block_size + 1, block_size):
        # _tagged_sha256("block", parent, the packed ids), in one call: a router hashes every prompt it sees
        block = pack(*token_ids[start : start + block_size])
        parent = hashlib.sha256(before + parent + between + block).digest()
        yield BlockHash(parent)


def pack_keys(hashes: Iterable[BlockHash]) -> bytes:
    """Routing keys of blocks, one after the other: the first 8 bytes of each hash.

    A key says where a prefix probably is, never what is in a block: two blocks that share one cost a worse choice.
    """
    return b"".join([block_hash[:KEY_BYTES] for block_hash in hashes])


def unpack_keys(packed: bytes) -> tuple[int, ...]:
    """The keys as numbers. Raises: struct.error: not a whole number of keys."""
    return struct.unpack(f"<{len(packed) // KEY_BYTES}Q", packed)


def _tagged_sha256(tag: str, *parts: bytes) -> bytes:
    """SHA-256 of a tag and length-prefixed parts, so that no two different inputs share an encoding."""
    return hashlib.sha256(b"".join(_length(len(part)) + part for part in (tag.encode(), *parts))).digest()


def _length(num_bytes: int) -> bytes:
    return struct.pack("<I", num_bytes)
