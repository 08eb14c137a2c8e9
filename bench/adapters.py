"""What LoRA adapters cost an engine step of the default model, in turns with the same step without any.

    python -m bench.adapters [--rank 16] [--rounds 15]

Float32, our CPU kernels, adapters of all seven targets; medians of the thread's own time, which other processes do not
take.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

from cluster.folders import default_model_folder
from engine.adapter_config import TARGETS
from engine.cpu.runner import CpuModelRunner
from engine.step import SampleSpec, SequenceSlice, StepPlan
from tests.engine.random_adapters import write_adapter
from tests.engine.token_stream import GREEDY

CONTEXT_TOKENS, PROMPT_TOKENS, NUM_SEQUENCES = 128, 192, 8
BLOCKS = 16  # of each sequence


def main() -> None:
    parser = argparse.ArgumentParser(description="What LoRA adapters cost an engine step.")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    model, names = default_model_folder(), [f"a{index}" for index in range(NUM_SEQUENCES)]
    with tempfile.TemporaryDirectory() as folder:
        adapters = {
            name: write_adapter(Path(folder) / name, model, tuple(TARGETS), arguments.rank, strength=0.1)
            for name in names
        }
        runner = CpuModelRunner.load(model, "float32", NUM_SEQUENCES * BLOCKS, adapters=adapters)
    plans = {
        "decode of 1": (_decode([""]), _decode(names[:1])),
        "decode of 8, one adapter": (_decode([""] * 8), _decode(names[:1] * 8)),
        "decode of 8, four without": (_decode([""] * 8), _decode(["", "a0"] * 4)),
        "decode of 8, eight adapters": (_decode([""] * 8), _decode(names)),
        f"prompt of {PROMPT_TOKENS}": (_step([""], PROMPT_TOKENS, 0), _step(names[:1], PROMPT_TOKENS, 0)),
    }
    print(f"rank {arguments.rank}; milliseconds a step")
    print("| step | without | with | |\n| --- | --- | --- | --- |")
    for name, pair in plans.items():
        times: tuple[list[float], list[float]] = ([], [])
        for plan, took in [*zip(pair, times, strict=True)] * (arguments.rounds + 1):
            begun = time.thread_time()
            runner.run(plan)
            took.append(time.thread_time() - begun)
        without, adapted = (1e3 * statistics.median(took[1:]) for took in times)
        print(f"| {name} | {without:.1f} | {adapted:.1f} | {adapted / without - 1:+.0%} |")


def _decode(adapters: list[str]) -> StepPlan:
    return _step(adapters, 1, CONTEXT_TOKENS)


def _step(adapters: list[str], num_tokens: int, start: int) -> StepPlan:
    tokens, sample = tuple(range(5, 5 + num_tokens)), (SampleSpec(GREEDY, 1),)
    return StepPlan(
        tuple(
            SequenceSlice(
                str(index), tokens, start, tuple(range(index * BLOCKS, (index + 1) * BLOCKS)), sample, adapter
            )
            for index, adapter in enumerate(adapters)
        )
    )


if __name__ == "__main__":
    main()
