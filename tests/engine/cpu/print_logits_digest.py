"""Prints a SHA-256 over the logits and KV of a few prompts: run in two processes, and compare."""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path

import torch

from engine.cpu.runner import CpuModelRunner
from tests.engine.invariance import forced_prompts
from tests.engine.token_stream import pooled_sequences, prefill


def main() -> None:
    digest = hashlib.sha256()
    for dtype in ("float32", "bfloat16"):
        runner = CpuModelRunner.load(Path(sys.argv[1]), dtype, num_blocks=64)
        prompts = forced_prompts(runner.vocab_size, (1, 40, 200))
        for sequence in pooled_sequences(runner, prompts, 0, random.Random(0)):
            digest.update(prefill(runner, sequence, 64).numpy().tobytes())
        digest.update(runner.kv_pool.view(torch.uint8).numpy().tobytes())
    print(digest.hexdigest())


main()
