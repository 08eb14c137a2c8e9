"""A small leader of two ranks for tests, and as a program: says its rank's pid, then waits to be killed."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from core.errors import RankLost
from engine.model_config import ModelConfig
from engine.models.decoder import Gather
from engine.parallel.runner import ParallelRunner
from engine.parallel.shard import Shard
from engine.torch_runner import TorchModelRunner, make_pool

NUM_BLOCKS = 64
STEP_TIMEOUT_S = 3.0


def make_shard(
    folder: Path, shard: Shard, pool: torch.Tensor, gather: Gather, adapters: Mapping[str, Path] | None = None
) -> TorchModelRunner:
    return TorchModelRunner.load(
        folder, "float32", NUM_BLOCKS, shard=shard, pool=pool, gather=gather, adapters=adapters
    )


def start_two(
    folder: Path,
    on_lost: Callable[[RankLost], None] = lambda _lost: None,
    make: Callable[[Path, Shard, torch.Tensor, Gather], TorchModelRunner] = make_shard,
    *,
    step_timeout_s: float = STEP_TIMEOUT_S,
    silence_timeout_s: float = 60.0,
) -> ParallelRunner:
    part = Shard(0, 2).config(ModelConfig.load(folder))
    pools = [make_pool(part, "float32", NUM_BLOCKS, 16).share_memory_() for _ in range(2)]
    return ParallelRunner(
        partial(make, folder), pools, on_lost, step_timeout_s=step_timeout_s, silence_timeout_s=silence_timeout_s
    )


if __name__ == "__main__":
    start_two(Path(sys.argv[1]))
    [rank] = multiprocessing.active_children()
    print(rank.pid, flush=True)
    sys.stdin.read()
