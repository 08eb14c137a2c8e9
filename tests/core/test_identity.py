"""A hit needs the exact identity: every field, tenant and salt counts, and equal ones do hit."""

import os
import subprocess
import sys
from dataclasses import fields, replace

import pytest

from core.errors import PeerRefused
from core.identity import SCHEMA_REVISION, Adapter, CacheIdentity, block_hashes, extend_hashes, namespace

IDENTITY = CacheIdentity(
    schema_revision=SCHEMA_REVISION,
    weights_digest="w",
    tokenizer_digest="t",
    kv_dtype="float32",
    kv_layout="l",
    block_size=4,
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    tensor_parallel_size=1,
    numeric_class="n",
)
TOKENS = tuple(range(100, 118))
ROOT = namespace(IDENTITY.digest(), "tenant", "salt")


def other_value(value: object) -> object:
    return value + 1 if isinstance(value, int) else f"{value}x"


@pytest.mark.parametrize("name", [item.name for item in fields(CacheIdentity)])
def test_each_field_alone_changes_the_digest_and_is_named_in_the_refusal(name: str) -> None:
    other = replace(IDENTITY, **{name: other_value(getattr(IDENTITY, name))})
    assert other.digest() != IDENTITY.digest()
    with pytest.raises(PeerRefused, match=name):
        IDENTITY.require_equal(other)


def test_equal_identities_agree() -> None:
    assert replace(IDENTITY).digest() == IDENTITY.digest()
    IDENTITY.require_equal(replace(IDENTITY))


def test_a_field_cannot_pass_for_its_neighbour() -> None:
    one = replace(IDENTITY, weights_digest="ab", tokenizer_digest="c")
    other = replace(IDENTITY, weights_digest="a", tokenizer_digest="bc")
    assert one.digest() != other.digest()
    assert namespace(b"d", "ab", "c") != namespace(b"d", "a", "bc")


def test_only_full_blocks_are_hashed_and_the_chain_extends() -> None:
    hashes = block_hashes(ROOT, TOKENS, 4)
    assert len(hashes) == 4
    assert block_hashes(ROOT, TOKENS[:8], 4) == hashes[:2]
    assert list(extend_hashes(ROOT, hashes[:1], TOKENS, 4)) == hashes[1:]
    assert block_hashes(ROOT, TOKENS[:3], 4) == []


def test_a_block_depends_on_everything_before_it() -> None:
    changed = (TOKENS[0] + 1, *TOKENS[1:])
    pairs = zip(block_hashes(ROOT, TOKENS, 4), block_hashes(ROOT, changed, 4), strict=True)
    assert all(one != other for one, other in pairs)
    assert block_hashes(ROOT, TOKENS, 4) == block_hashes(ROOT, tuple(TOKENS), 4)


@pytest.mark.parametrize(("tenant", "salt"), [("other", "salt"), ("tenant", "other"), ("", "salt"), ("tenant", "")])
def test_tenants_and_salts_do_not_share(tenant: str, salt: str) -> None:
    theirs = block_hashes(namespace(IDENTITY.digest(), tenant, salt), TOKENS, 4)
    assert not set(theirs) & set(block_hashes(ROOT, TOKENS, 4))


def test_adapters_share_with_nobody_but_their_own_content() -> None:
    def first_block(adapter: Adapter | None) -> bytes:
        return block_hashes(namespace(IDENTITY.digest(), "tenant", "salt", adapter), TOKENS, 4)[0]

    assert first_block(None) == block_hashes(ROOT, TOKENS, 4)[0]
    assert first_block(Adapter("poet", "d1")) == first_block(Adapter("poet again", "d1"))
    assert len({first_block(adapter) for adapter in (None, Adapter("poet", "d1"), Adapter("poet", "d2"))}) == 3
    assert namespace(b"d", "t", "s", Adapter("a", "")) != namespace(b"d", "t", "s")


def test_processes_with_different_hash_seeds_agree() -> None:
    program = (
        "from core.identity import block_hashes, namespace;"
        "print(block_hashes(namespace(b'd' * 32, 'tenant', 'salt'), range(40), 4)[-1].hex())"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, text=True,
            capture_output=True, check=True, timeout=60,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(answers) == 1
