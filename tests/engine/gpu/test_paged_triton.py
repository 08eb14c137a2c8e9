"""The Triton kernel under Triton's interpreter, against attention that one can check by reading."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.backend import DeviceBatch
from engine.attention.paged_triton import triton_attention
from tests.engine.gpu.attention_cases import DECODES, HEADS, LAYER, MIXED, Heads, batch_of, filled_pool, random_queries
from tests.engine.gpu.compile_kernels import CASES
from tests.engine.gpu.reference_attention import reference_attention

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("lengths", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("block_size", [16, 32])
def test_float32_equals_the_reference(lengths: tuple[tuple[int, int], ...], heads: Heads, block_size: int) -> None:
    pool, batch = filled_pool(heads, block_size, torch.float32), batch_of(lengths, block_size)
    queries = random_queries(len(batch.slot_mapping), heads)
    expected = reference_attention(pool, heads.num_heads).begin_step(batch).attend(LAYER, queries)
    got = triton_attention(pool, heads.num_heads, exact=False).begin_step(batch).attend(LAYER, queries)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)
    padding = batch.query_starts[batch.context_lens.tolist().index(0)]
    assert not got[padding].any()
    assert got[padding - 1].any()


def test_bfloat16_rounds_queries_and_weights_and_no_more() -> None:
    heads = HEADS[0]
    pool, batch = filled_pool(heads, 16, torch.bfloat16), batch_of(MIXED, 16)
    queries = random_queries(len(batch.slot_mapping), heads)
    expected = reference_attention(pool, heads.num_heads).begin_step(batch).attend(LAYER, queries)
    got = triton_attention(pool, heads.num_heads, exact=False).begin_step(batch).attend(LAYER, queries)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
    assert not torch.equal(got, expected)


def multiply_like_a_gpu(left: np.ndarray, right: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """left @ right, where the order of a sum depends on the tile's height and not on the row's place in it."""
    steps = np.roll(np.arange(left.shape[-1]), left.shape[-2])
    return np.add.reduce(left[..., :, steps, None] * right[..., None, steps, :], axis=-2, dtype=dtype)


def test_a_row_is_the_same_to_the_bit_in_any_batch_and_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of a sequence: decoded alone, decoded among others, at the end of each of several chunks.

    The interpreter's products are numpy's, whose rows depend on their place in a tile on some processors (AVX2)."""
    monkeypatch.setattr(np, "matmul", multiply_like_a_gpu)
    heads, context = HEADS[0], 129
    pool = filled_pool(heads, 16, torch.float32)
    attention = triton_attention(pool, heads.num_heads, exact=True)
    batch = batch_of(((70, context),), 16)
    queries = random_queries(70, heads)
    whole = attention.begin_step(batch).attend(LAYER, queries)
    for tokens in (1, 2, 22, 69):
        lengths = ((1, 20), (tokens, context), (1, 90))
        tables = batch_of(lengths, 16).block_tables
        tables[1, :] = torch.nn.functional.pad(batch.block_tables[0], (0, tables.shape[1]))[: tables.shape[1]]
        mixed = DeviceBatch(
            slot_mapping=torch.zeros(tokens + 2, dtype=torch.int64),
            query_starts=torch.tensor([0, 1, 1 + tokens, 2 + tokens], dtype=torch.int32),
            context_lens=torch.tensor([context for _, context in lengths], dtype=torch.int32),
            block_tables=tables,
            most_queries=tokens,
            most_context=context,
        )
        among = torch.cat((queries[:1], queries[-tokens:], queries[:1]))
        got = attention.begin_step(mixed).attend(LAYER, among)
        assert torch.equal(got[1 : 1 + tokens], whole[-tokens:]), tokens
    assert not torch.equal(whole[-1], whole[-2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_is_written_to_its_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    heads = HEADS[0]
    pool = filled_pool(heads, 16, dtype)
    before = pool.clone()
    slots = [5 * 16 + 15, 0, 23 * 16 + 3]
    batch = batch_of(((3, 3),), 16)
    batch = DeviceBatch(torch.tensor(slots), batch.query_starts, batch.context_lens, batch.block_tables, 3, 3)
    keys, values = torch.randn(2, 3, heads.num_kv_heads, heads.head_dim).to(dtype)
    triton_attention(pool, heads.num_heads, exact=False).begin_step(batch).write_kv(LAYER, keys, values)
    for index, slot in enumerate(slots):
        assert torch.equal(pool[slot // 16, LAYER, 0, slot % 16], keys[index])
        assert torch.equal(pool[slot // 16, LAYER, 1, slot % 16], values[index])
        before[slot // 16, LAYER, :, slot % 16] = pool[slot // 16, LAYER, :, slot % 16]
    assert torch.equal(pool, before)


def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """In a process of its own: in this one Triton interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.engine.gpu.compile_kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sizes = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(sizes) == len(CASES)
    assert min(sizes) > 0
