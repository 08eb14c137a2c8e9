"""Tensor parallelism on GPUs: is it right, is it exact, how fast? For one short run on a host of 2 or more.

    TANDEM_EXACT=0 python -m bench.gpu.ranks --model FOLDER --size 2 --out ranks_report.json

FOLDER: any model that the size divides. With fewer GPUs it refuses; `--device cpu` runs the same code by torch and Gloo
on this machine, for what comes out and not for how fast. Sections, each a line and an entry of the report:

- logits: of `--size` ranks against one, in chunks and decodes (by graph, on a GPU): the largest difference as a share
  of the largest logit, and whether equal to the bit;
- kv: the pools of all ranks side by side against the one's;
- decode, prefill: milliseconds of a step, by one and by `--size` ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from bench.gpu.machine import BLOCK_SIZE
from bench.gpu.timing import decode_plan, prefill_plan
from core.errors import RankLost
from engine.load_runner import ENGINE_VARIABLE, load_runner
from engine.step import StepPlan
from tests.engine.token_stream import pooled_sequences, prefill

LOGIT_TOLERANCE: Final = {"float32": 1e-4, "bfloat16": 0.05}  # guesses, as in bench/gpu/checks.py
HEAD_DIMENSION: Final = {"cuda": 4, "cpu": 3}  # of the pool: engine/attention/paged.py, engine/torch_runner.py
ROUNDS: Final = 10


def require_gpus(device: str, size: int) -> None:
    """Raises: SystemExit: there are fewer than `size`."""
    count = torch.cuda.device_count()
    if device == "cuda" and count < size:
        raise SystemExit(f"--size {size} wants as many GPUs, torch sees {count}: nothing was checked")


def logits_of(runner: Any, lengths: tuple[int, ...], chunk_tokens: int) -> torch.Tensor:
    """After each prompt, alone, then after two more tokens, all in one step. [3 * num_prompts, vocab_size]."""
    order = random.Random(11)
    prompts = [[order.randrange(3, runner.vocab_size) for _ in range(length)] for length in lengths]
    sequences = pooled_sequences(runner, prompts, 2, random.Random(0))
    rows = [prefill(runner, sequence, chunk_tokens) for sequence in sequences]
    for token in (17, 18):
        for sequence in sequences:
            sequence.token_ids.append(token)
        rows.extend(runner.logits(StepPlan(tuple(sequence.next_slice(1) for sequence in sequences))).clone())
    return torch.stack(rows)


def compare_logits(one: Any, ranks: Any, dtype: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Raises: AssertionError: they are further apart than LOGIT_TOLERANCE."""
    figures: dict[str, Any] = {}
    for chunk_tokens in (4096, 48):
        expected, got = logits_of(one, lengths, chunk_tokens), logits_of(ranks, lengths, chunk_tokens)
        difference = float((got - expected).abs().max() / expected.abs().max())
        assert difference < LOGIT_TOLERANCE[dtype], difference
        figures[f"chunks of {chunk_tokens}"] = {
            "largest_difference": difference,
            "equal_to_the_bit": torch.equal(got, expected),
            "greedy_agreement": float((got.argmax(dim=-1) == expected.argmax(dim=-1)).float().mean()),
        }
    return figures


def compare_kv(one: Any, ranks: Any, device: str) -> dict[str, Any]:
    """What `compare_logits` has left in the pools."""
    parts = [pool.cpu() for pool in ranks.kv_pools]
    got, expected = torch.cat(parts, dim=HEAD_DIMENSION[device]), one.kv_pools[0].cpu()
    assert got.any()
    return {"equal_to_the_bit": torch.equal(got, expected), "largest_difference": float((got - expected).abs().max())}


def step_ms(runner: Any, plan: StepPlan) -> float:
    """Median wall milliseconds of `run`, after two that are not counted."""
    seconds = []
    for _ in range(ROUNDS + 2):
        start_s = time.perf_counter()
        runner.run(plan)
        seconds.append(time.perf_counter() - start_s)
    return 1e3 * statistics.median(seconds[2:])


def time_steps(one: Any, ranks: Any, plans: dict[str, StepPlan]) -> dict[str, Any]:
    """By one rank, and by all."""
    return {name: {"one_ms": step_ms(one, plan), "ranks_ms": step_ms(ranks, plan)} for name, plan in plans.items()}


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder in Hugging Face form")
    parser.add_argument("--size", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=LOGIT_TOLERANCE, help="(default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=HEAD_DIMENSION, help="(default: %(default)s)")
    parser.add_argument("--num-blocks", type=int, default=2048, help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small steps: that it runs, not what comes out")
    parser.add_argument("--out", type=Path, default=Path("ranks_report.json"), help="(default: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """0 if nothing failed."""
    options = parse_options(arguments)
    require_gpus(options.device, options.size)
    os.environ[ENGINE_VARIABLE] = "gpu" if options.device == "cuda" else "torch"

    def lost(error: RankLost) -> None:
        print(f"{error}", file=sys.stderr, flush=True)

    place = (options.model, options.dtype, options.num_blocks, BLOCK_SIZE)
    one: Any = load_runner(*place)
    ranks: Any = load_runner(*place, tensor_parallel_size=options.size, on_rank_lost=lost)
    batches, prompts = ((1, 2), (24,)) if options.quick else ((1, 8, 32), (128, 1024, 2048))
    lengths = (1, 18) if options.quick else (1, 17, 130, 700)
    decodes = {f"batch {batch}": decode_plan(batch, 32 if options.quick else 512) for batch in batches}
    prefills = {f"{length} tokens": prefill_plan(length, one.vocab_size) for length in prompts}
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "logits": lambda: compare_logits(one, ranks, options.dtype, lengths),
        "kv": lambda: compare_kv(one, ranks, options.device),
        "decode": lambda: time_steps(one, ranks, decodes),
        "prefill": lambda: time_steps(one, ranks, prefills),
    }
    report = {}
    for name, figures in sections.items():
        report[name] = figures()
        print(f"{name}: {json.dumps(report[name])}", flush=True)
        options.out.write_text(json.dumps(report, indent=1))
    ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
