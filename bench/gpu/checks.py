"""Is what the GPU computes right? Each check gives figures for the report and raises AssertionError where it is not."""

from __future__ import annotations

import random
from typing import Any, Final

import torch

from bench.gpu.machine import Machine
from core.request import SamplingParams
from engine.dtypes import DTYPES
from engine.gpu.runner import GpuModelRunner
from engine.step import SampleSpec, SequenceSlice, StepPlan
from tests.engine.golden import golden_cases
from tests.engine.gpu.attention_cases import LAYER, MIXED, Heads, batch_of, filled_pool, random_queries
from tests.engine.gpu.reference_attention import reference_attention
from tests.engine.invariance import assert_batches_agree, assert_chunks_agree
from tests.engine.token_stream import generate, pooled_sequences, prefill

# Of a logit from the CPU's float32, as a share of the largest. Unrun: guesses, from what the CPU does.
LOGIT_TOLERANCE: Final = {"float32": 1e-4, "bfloat16": 0.05}
# Tokens may leave the golden ones where the best two logits are closer than this. In bfloat16 logits of the default
# model are up to 0.4 from float32's, and the two best up to 0.1 nearer, on a CPU too (golden case chat_capital).
GOLDEN_GAP: Final = {"float32": 1e-3, "bfloat16": 0.2}
KERNEL_TOLERANCE: Final = {"float32": 1e-5, "bfloat16": 2e-2}
GREEDY: Final = SampleSpec(SamplingParams(temperature=0.0), 0)


def check_kernel(machine: Machine, dtype: str) -> dict[str, Any]:
    """The chosen attention kernel alone, against attention in float64: prefills, decodes and a padding row at once."""
    torch_dtype, place = DTYPES[dtype], machine.device.torch_device
    config = machine.config
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
    pool, batch = filled_pool(heads, 16, torch_dtype), batch_of(MIXED, 16)
    queries = random_queries(len(batch.slot_mapping), heads)
    expected = reference_attention(pool, heads.num_heads).begin_step(batch).attend(LAYER, queries)
    on_device = type(batch)(
        *(getattr(batch, name).to(place) for name in ("slot_mapping", "query_starts", "context_lens", "block_tables")),
        most_queries=batch.most_queries,
        most_context=batch.most_context,
    )
    with machine.device.stream():
        attention = machine.make_attention(dtype, False)(pool.to(place))
        got = attention.begin_step(on_device).attend(LAYER, queries.to(place)).cpu()
        machine.device.finish()
    difference = float((got - expected).abs().max())
    assert difference < KERNEL_TOLERANCE[dtype], difference
    return {"kernel": attention.name, "largest_difference": difference}


def check_logits(machine: Machine, dtype: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Prompts whole and in chunks, then a decode by graph, against the CPU's float32 runner."""
    order = random.Random(11)
    prompts = [[order.randrange(3, machine.config.vocab_size) for _ in range(length)] for length in lengths]
    expected = _logits(machine.reference(machine.num_blocks), prompts, 4096)
    differences = {}
    for chunk_tokens in (4096, 48):
        got = _logits(machine.runner(dtype), prompts, chunk_tokens)
        differences[f"chunks of {chunk_tokens}"] = float((got - expected).abs().max() / expected.abs().max())
    agreeing = float((got.argmax(dim=-1) == expected.argmax(dim=-1)).float().mean())
    assert max(differences.values()) < LOGIT_TOLERANCE[dtype], differences
    return {"largest_difference": differences, "greedy_agreement": agreeing}


def check_golden(machine: Machine, dtype: str, most_tokens: int) -> dict[str, Any]:
    """The golden cases in one batch, each up to its first narrow gap."""
    cases = golden_cases()
    lengths = [min(most_tokens, len(case["output_ids"])) for case in cases]
    outputs = generate(machine.runner(dtype), [case["prompt_ids"] for case in cases], lengths, 256)
    left: dict[str, float] = {}
    for case, output in zip(cases, outputs, strict=True):
        pairs = zip(output, case["output_ids"], case["gaps"], strict=False)
        gap = next((gap for got, expected, gap in pairs if got != expected), None)
        if gap is not None:
            left[case["name"]] = gap
    assert all(gap < GOLDEN_GAP[dtype] for gap in left.values()), left
    return {"identical": len(cases) - len(left), "of": len(cases), "left_at_gap": left}


def check_graphs(machine: Machine, dtype: str) -> dict[str, Any]:
    """At a bucket's own size a graph runs the kernels that an eager step runs: equal to the bit."""
    by_graph, eager = machine.runner(dtype), machine.runner(dtype, graphs=False)
    equal = {}
    for count in (1, 2, machine.max_graph_sequences):
        rows = [_decode_logits(runner, count) for runner in (by_graph, eager)]
        equal[str(count)] = torch.equal(*rows)
    assert all(equal.values()), equal
    return {"equal_to_the_bit": equal}


def check_invariance(machine: Machine, dtype: str, lengths: tuple[int, ...], chunks: tuple[int, ...]) -> dict[str, Any]:
    """In the exact mode a token is the same to the bit in any batch and chunk; of the plain mode it is only told."""
    figures: dict[str, Any] = {}
    for name, check in (
        ("chunks", lambda runner: assert_chunks_agree(runner, lengths, chunks)),
        ("batches", lambda runner: assert_batches_agree(runner, lengths)),
    ):
        try:
            check(machine.runner(dtype))
            figures[f"plain_{name}"] = True
        except AssertionError:
            figures[f"plain_{name}"] = False
        check(machine.runner(dtype, exact=True))
        figures[f"exact_{name}"] = True
    return figures


def _logits(runner: Any, prompts: list[list[int]], chunk_tokens: int) -> torch.Tensor:
    """After each prompt, alone; then after one more token, all in one step. [2 * num_prompts, vocab_size]."""
    sequences = pooled_sequences(runner, prompts, 1, random.Random(0))
    rows = [prefill(runner, sequence, chunk_tokens) for sequence in sequences]
    for sequence in sequences:
        sequence.token_ids.append(17)
    return torch.stack([*rows, *runner.logits(StepPlan(tuple(sequence.next_slice(1) for sequence in sequences)))])


def _decode_logits(runner: GpuModelRunner, count: int) -> torch.Tensor:
    """One decode step of `count` sequences that have a block of context each."""
    prompts = tuple(SequenceSlice(str(row), tuple(range(5 + row, 20 + row)), 0, (row,)) for row in range(count))
    runner.run(StepPlan(prompts))
    return runner.logits(StepPlan(tuple(SequenceSlice(str(row), (9,), 15, (row,), (GREEDY,)) for row in range(count))))
