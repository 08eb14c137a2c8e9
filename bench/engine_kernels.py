"""How fast one core computes steps of the default model, beside what bounds it.

    python -m bench.engine_kernels [--engines blocks,floats,torch] [--dtypes bfloat16,float32] [--rounds 5]

The process is pinned to one core and times are those of its thread on that core, so that other processes which take
turns on the core do not count; what they do to the caches and the memory does. Each figure is a median, and stands
beside the floor that the machine allows, measured in the same run:
- prefill: multiplications at the rate of a large torch matmul of the dtype;
- decode: the larger of that and of reading all weights once, plus reading all KV once, at the rate of a long sum.
blocks: our kernels with the default model's 4-bit and 8-bit blocks, which are a third of bfloat16's bytes, so
that it may pass the floor; floats: the same kernels with the same weights as floats of the dtype.
Decode runs over a pool of random KV: what it costs does not depend on the values.
Last, what it costs attention that the layers of a block lie together, so that a block is one run of bytes to transfer:
the attention of a whole decode step over such a pool, and over one in which the blocks of a layer lie together.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

# Before torch is imported: one thread on one core.
os.environ["OMP_NUM_THREADS"] = "1"
import torch

from cluster.folders import default_model_folder
from core.request import SamplingParams
from engine.cpu.build import build_library
from engine.cpu.memory import HugeMemory
from engine.cpu.runner import PAGE_TOKENS, CpuModelRunner
from engine.dtypes import DTYPES
from engine.gguf_import import import_default_model
from engine.model_config import ModelConfig
from engine.step import SampleSpec, SequenceSlice, StepPlan
from engine.torch_runner import TorchModelRunner

PREFILL_TOKENS: Final = (128, 1024, 2048)
DECODE_BATCHES: Final = (1, 8, 32)
DECODE_CONTEXT: Final = 512
NUM_BLOCKS: Final = 32 * DECODE_CONTEXT // PAGE_TOKENS
ATTENTION_SOURCE: Final = Path(__file__).parent / "engine_attention.cpp"
GREEDY: Final = (SampleSpec(SamplingParams(temperature=0.0), 0),)


def load_floats(folder: Path, dtype: str, num_blocks: int) -> CpuModelRunner:
    """The CPU kernels with weights as floats."""
    return CpuModelRunner.load(folder, dtype, num_blocks, unpack=True)


LOADERS: Final[dict[str, Callable[[Path, str, int], Any]]] = {
    "blocks": CpuModelRunner.load,
    "floats": load_floats,
    "torch": TorchModelRunner.load,
}


def median_s(action: Callable[[], object], rounds: int) -> float:
    """Median seconds of this thread on its core, after one round that is not counted."""
    action()
    seconds = []
    for _ in range(rounds):
        start_s = time.thread_time()
        action()
        seconds.append(time.thread_time() - start_s)
    return statistics.median(seconds)


def read_bytes_per_s() -> float:
    """Rate of a sum over 256 MiB on huge pages: the best of several."""
    values = HugeMemory(256 << 20).tensor((64 << 20,), torch.float32).fill_(1.0)
    return values.nbytes / min(median_s(values.sum, 1) for _ in range(5))


def multiply_flops_per_s(dtype: torch.dtype) -> float:
    """Rate of a matmul of 1024 rows with a matrix of the default model's kind, the best of several: in the dtype, or in
    float32 where that is faster, as without bfloat16 instructions."""
    return max(_matmul_flops_per_s(kind) for kind in {dtype, torch.float32})


def _matmul_flops_per_s(dtype: torch.dtype) -> float:
    rows, matrix = torch.randn(1024, 576).to(dtype), torch.randn(3072, 576).to(dtype)
    flops = 2 * rows.shape[0] * matrix.numel()
    return flops / min(median_s(lambda: torch.nn.functional.linear(rows, matrix), 1) for _ in range(9))


class Floors:
    """The least seconds that a step can take."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.bytes_per_s = read_bytes_per_s()
        self.flops_per_s = multiply_flops_per_s(dtype)
        kv_size = config.num_kv_heads * config.head_dim
        query_size = config.num_heads * config.head_dim
        layer = config.hidden_size * (2 * query_size + 2 * kv_size + 3 * config.intermediate_size)
        self._layer_values = config.num_layers * layer
        self._head_values = config.vocab_size * config.hidden_size
        self._attention_flops = 4 * query_size * config.num_layers  # for each token of context
        self._kv_bytes = 2 * kv_size * config.num_layers * dtype.itemsize
        self._itemsize = dtype.itemsize

    def prefill_s(self, num_tokens: int) -> float:
        flops = num_tokens * (2 * self._layer_values + self._attention_flops * num_tokens / 2)
        return (flops + 2 * self._head_values) / self.flops_per_s

    def decode_s(self, batch: int) -> float:
        values = self._layer_values + self._head_values
        weights_s = max(values * self._itemsize / self.bytes_per_s, 2 * batch * values / self.flops_per_s)
        return weights_s + batch * DECODE_CONTEXT * self._kv_bytes / self.bytes_per_s


def prefill_plan(num_tokens: int) -> StepPlan:
    """A whole prompt in one step."""
    tokens = tuple(100 + 37 * index % 40000 for index in range(num_tokens))
    return StepPlan((SequenceSlice("prompt", tokens, 0, tuple(range(-(-num_tokens // PAGE_TOKENS))), GREEDY),))


def decode_plan(batch: int) -> StepPlan:
    """One token for each of `batch` sequences, whose blocks lie scattered."""
    blocks_each = DECODE_CONTEXT // PAGE_TOKENS
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()
    return StepPlan(
        tuple(
            SequenceSlice(
                str(index),
                (1000 + index,),
                DECODE_CONTEXT - 1,
                tuple(blocks[index * blocks_each : (index + 1) * blocks_each]),
                GREEDY,
            )
            for index in range(batch)
        )
    )


def measure(runner: Any, floors: Floors, rounds: int) -> dict[str, tuple[float, float]]:
    """For each case: tokens per second, and its share of the floor's."""
    runner.kv_pool.normal_(generator=torch.Generator().manual_seed(1))
    figures = {}
    for batch in DECODE_BATCHES:
        plan = decode_plan(batch)
        seconds = median_s(lambda plan=plan: runner.run(plan), max(rounds, 5 * rounds // batch))  # type: ignore[misc]
        figures[f"decode {batch}"] = (batch / seconds, floors.decode_s(batch) / seconds)
    for num_tokens in PREFILL_TOKENS:
        plan = prefill_plan(num_tokens)
        seconds = median_s(lambda plan=plan: runner.run(plan), rounds)  # type: ignore[misc]
        figures[f"prefill {num_tokens}"] = (num_tokens / seconds, floors.prefill_s(num_tokens) / seconds)
    return figures


def attention_s(config: ModelConfig, batch: int, rounds: int) -> tuple[float, float]:
    """Seconds of all layers' decode attention in bfloat16, over a block-major pool and over a layer-major one."""
    attend = ctypes.CDLL(str(build_library(ATTENTION_SOURCE))).bench_attend
    shape = (NUM_BLOCKS, config.num_layers, 2, config.num_kv_heads, PAGE_TOKENS, config.head_dim)
    pool = HugeMemory(2 * math.prod(shape)).tensor(shape, torch.bfloat16).normal_()
    queries = torch.randn(config.num_heads, config.head_dim)
    num_pages = DECODE_CONTEXT // PAGE_TOKENS
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0))[: batch * num_pages].int()
    sizes = (NUM_BLOCKS, config.num_layers, config.num_kv_heads, config.head_dim)
    group = config.num_heads // config.num_kv_heads

    def run(is_block_major: int) -> None:
        addresses = [ctypes.c_void_p(item.data_ptr()) for item in (pool, blocks, queries)]
        attend(addresses[0], is_block_major, *sizes, group, addresses[1], batch, num_pages, addresses[2])

    return median_s(lambda: run(1), 3 * rounds), median_s(lambda: run(0), 3 * rounds)


def print_layout_cost(config: ModelConfig, rounds: int) -> None:
    print(f"\nattention of all layers, bfloat16{'block-major':>15}{'layer-major':>15}")
    for batch in DECODE_BATCHES:
        block_major_s, layer_major_s = attention_s(config, batch, rounds)
        print(f"decode {batch:<26}{block_major_s * 1e3:12.2f} ms{layer_major_s * 1e3:12.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="blocks,floats,torch", help="which to measure (default: %(default)s)")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="steps per figure (default: %(default)s)")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="(default: the last)")
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    folder = import_default_model(default_model_folder(), print)
    print(f"core {options.core}, load average {os.getloadavg()[0]:.1f}, decode at context {DECODE_CONTEXT}")
    for dtype in options.dtypes.split(","):
        floors = Floors(ModelConfig.load(folder), DTYPES[dtype])
        rates = f"read {floors.bytes_per_s / 1e9:.1f} GB/s, multiply {floors.flops_per_s / 1e9:.0f} GFLOP/s"
        results = {}
        for name in options.engines.split(","):
            runner = LOADERS[name](folder, dtype, NUM_BLOCKS)
            results[name] = measure(runner, floors, options.rounds)
            del runner
        print_table(f"{dtype} ({rates})", results)
    print_layout_cost(ModelConfig.load(folder), options.rounds)


def print_table(title: str, results: dict[str, dict[str, tuple[float, float]]]) -> None:
    """tokens/s and share of the floor for each engine; the first one's gain over the last."""
    print(
        f"\n{title}\n{'':14}" + "".join(f"{name + ' tok/s':>14}{'of floor':>10}" for name in results) + f"{'ratio':>8}"
    )
    first, last = next(iter(results.values())), list(results.values())[-1]
    for case in first:
        cells = "".join(f"{rows[case][0]:14.1f}{rows[case][1]:10.0%}" for rows in results.values())
        print(f"{case:14}{cells}{first[case][0] / last[case][0]:8.1f}")


if __name__ == "__main__":
    main()
