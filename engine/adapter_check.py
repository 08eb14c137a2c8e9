"""Whether what an adapter adds can be computed: where training diverged, weights may be finite and logits are not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from core.errors import BadModel, InvariantBroken
from core.request import SamplingParams
from engine.runner import ModelRunner
from engine.step import SampleSpec, SequenceSlice, StepPlan


def require_finite(runner: ModelRunner, adapters: Mapping[str, Path]) -> None:
    """Compute a few tokens with each adapter, into block 0, before anybody has it. adapters: folders by digest.

    Requests would end the worker, and KV that is no number, left in a block, would end whoever has it next.

    Raises: BadModel: with the folder.
    """
    num_tokens = min(runner.geometry.block_size, runner.vocab_size, runner.max_context_tokens)
    greedy = SampleSpec(SamplingParams(temperature=0.0), 0)
    for digest, folder in adapters.items():
        item = SequenceSlice("adapter-check", tuple(range(num_tokens)), 0, (0,), (greedy,), digest)
        try:
            runner.run(StepPlan((item,)))
        except InvariantBroken as error:
            raise BadModel(f"{folder}: cannot be computed: {error}") from error
