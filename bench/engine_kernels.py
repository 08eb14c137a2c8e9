"""How fast one core computes steps of the default model, beside what bounds it.

    python -m bench.engine_kernels [--engines blocks,floats,torch] [--dtypes bfloat16,float32] [--rounds 5]

The process is pinned to one core and times are those of its thread on that core, so that other processes which take
turns on the core do not count; what they do to the caches and the memory does. Each figure is a median, and so is its
share of the floor that the machine allows, which is measured again before each round, as neighbours come and go:
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
import functools
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


def taken_s(action: Callable[[], object]) -> float:
    """Seconds of this thread on its core."""
    start_s = time.thread_time()
    action()
    return time.thread_time() - start_s


def median_s(action: Callable[[], object], rounds: int) -> float:
    """Median seconds, after one round that is not counted."""
    action()
    return statistics.median(taken_s(action) for _ in range(rounds))


@functools.cache
def _long_values() -> torch.Tensor:
    return HugeMemory(256 << 20).tensor((64 << 20,), torch.float32).fill_(1.0)


def read_bytes_per_s() -> float:
    """Rate of a sum over 256 MiB on huge pages: the best of several."""
    values = _long_values()
    return values.nbytes / min(median_s(values.sum, 1) for _ in range(5))


def multiply_flops_per_s(dtype: torch.dtype) -> float:
    """Rate of a matmul of 1024 rows with a matrix of the default model's kind, the best of several: in the dtype, or in
    float32 where that is faster, as without bfloat16 instructions."""
    return _matmul_flops_per_s(_fastest(dtype), 9)


@functools.cache
def _fastest(dtype: torch.dtype) -> torch.dtype:
    return max({dtype, torch.float32}, key=lambda kind: _matmul_flops_per_s(kind, 1))


def _matmul_flops_per_s(dtype: torch.dtype, tries: int) -> float:
    rows, matrix = torch.randn(1024, 576).to(dtype), torch.randn(3072, 576).to(dtype)
    flops = 2 * rows.shape[0] * matrix.numel()
    return flops / min(median_s(lambda: torch.nn.functional.linear(rows, matrix), 1) for _ in range(tries))


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


def measure(runner: Any, new_floors: Callable[[], Floors], rounds: int) -> dict[str, tuple[float, float]]:
    """For each case: tokens per second, and the share of the floor's; medians."""
    runner.kv_pool.normal_(generator=torch.Generator().manual_seed(1))
    figures = {}
    for kind, size in [("decode", batch) for batch in DECODE_BATCHES] + [("prefill", size) for size in PREFILL_TOKENS]:
        step = functools.partial(runner.run, decode_plan(size) if kind == "decode" else prefill_plan(size))
        step()
        seconds, shares = [], []
        for _ in range(rounds):
            floor_s = getattr(new_floors(), f"{kind}_s")(size)
            for _ in range(max(1, 5 // size)):
                seconds.append(taken_s(step))
                shares.append(floor_s / seconds[-1])
        figures[f"{kind} {size}"] = (size / statistics.median(seconds), statistics.median(shares))
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
        measure_dtype(folder, dtype, options.engines.split(","), options.rounds)
    print_layout_cost(ModelConfig.load(folder), options.rounds)


def measure_dtype(folder: Path, dtype: str, engines: list[str], rounds: int) -> None:
    config, measured = ModelConfig.load(folder), []

    def new_floors() -> Floors:
        measured.append(Floors(config, DTYPES[dtype]))
        return measured[-1]

    results = {}
    for name in engines:
        runner = LOADERS[name](folder, dtype, NUM_BLOCKS)
        results[name] = measure(runner, new_floors, rounds)
        del runner
    read = spread([floors.bytes_per_s / 1e9 for floors in measured])
    multiplied = spread([floors.flops_per_s / 1e9 for floors in measured])
    print_table(f"{dtype} (read {read} GB/s, multiply {multiplied} GFLOP/s)", results)


def spread(values: list[float]) -> str:
    """Median (least-most)."""
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


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
