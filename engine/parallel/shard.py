"""Who computes what of a model that several ranks share, and what they are told of a step.

Every matrix is split by its rows, which are its outputs, and never by what a sum runs over: each number comes from one
dot product on one rank, and ranks only put results side by side (docs/adr/0028-tensor-parallelism.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from core.errors import BadRequest
from engine.model_config import ModelConfig
from engine.step import ScoreSpec, SequenceSlice, StepPlan

SPLIT_SIZES: Final = ("num_kv_heads", "hidden_size", "intermediate_size", "vocab_size")  # num_heads: as num_kv_heads


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part: rank in [0, size). Rank 0 leads."""

    rank: int = 0
    size: int = 1

    def rows(self, num_rows: int) -> slice:
        """Its rows of a matrix of `num_rows`, which `size` divides (require_split)."""
        share = num_rows // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def config(self, config: ModelConfig) -> ModelConfig:
        """The model as a rank sees it: its own heads, everything else whole."""
        return replace(config, num_heads=config.num_heads // self.size, num_kv_heads=config.num_kv_heads // self.size)


WHOLE: Final = Shard()


def require_split(config: ModelConfig, size: int) -> None:
    """Raises: BadRequest: on `tensor_parallel_size`: it does not divide a size of the model, which is named."""
    for name in SPLIT_SIZES:
        if getattr(config, name) % size:
            raise BadRequest(
                "tensor_parallel_size", f"{size} does not divide the model's {name}, {getattr(config, name)}"
            )


def plan_for_ranks(plan: StepPlan) -> StepPlan:
    """The same step for those who draw nothing: of each sample only the row that its logits come from."""
    return replace(plan, slices=tuple(_without_samples(item) for item in plan.slices))


def _without_samples(item: SequenceSlice) -> SequenceSlice:
    return replace(item, samples=tuple(ScoreSpec(row, token_id=0, num_top=0) for row in item.logit_rows))
