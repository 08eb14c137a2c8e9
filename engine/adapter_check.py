"""Whether what an adapter adds can be computed: where training diverged, weights may be finite and logits are not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from core.errors import BadModel
from engine.runner import ModelRunner
from engine.step import NOT_FINITE, PROBE, SequenceSlice, StepPlan


def require_finite(runner: ModelRunner, adapters: Mapping[str, Path]) -> None:
    """Compute a few tokens with each adapter, into block 0, before anybody has it. adapters: folders by digest.

    Every request for it would fail.

    Raises: BadModel: with the folder.
    """
    num_tokens = min(runner.geometry.block_size, runner.vocab_size, runner.max_context_tokens)
    for digest, folder in adapters.items():
        item = SequenceSlice("adapter-check", tuple(range(num_tokens)), 0, (0,), (PROBE,), digest)
        if runner.run(StepPlan((item,))) == [(NOT_FINITE,)]:
            raise BadModel(f"{folder}: cannot be computed: {NOT_FINITE.message}")
