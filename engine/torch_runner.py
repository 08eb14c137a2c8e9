"""Computes steps with torch over one paged KV pool in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from engine.adapter import AdapterWeights, adapted_rows, load_adapters
from engine.attention.backend import AttentionBatch
from engine.attention.cpu import CpuAttention
from engine.dtypes import require_dtype
from engine.model_config import ModelConfig
from engine.models.arithmetic import CpuArithmetic
from engine.models.decoder import DecoderModel, Gather, alone
from engine.parallel.shard import WHOLE, Shard
from engine.runner import clear_not_finite, copy_blocks
from engine.sampler import draw
from engine.slice_check import require_computable
from engine.step import NOT_FINITE, Answer, SequenceSlice, StepPlan
from engine.weights import load_weights

KV_LAYOUT: Final = "block,layer,key-value,head,token,dim"


class TorchModelRunner:
    """A ModelRunner. Prefill chunks and decodes of one plan are computed together.

    A token's logits are the same to the bit however its sequence was cut into chunks, batched or placed in the pool.
    """

    def __init__(
        self,
        model: DecoderModel,
        dtype: str,
        num_blocks: int,
        block_size: int,
        pool: torch.Tensor | None = None,
        adapters: Mapping[str, AdapterWeights] | None = None,
    ) -> None:
        """Use `load`; this is for models that are already in memory. pool: see `make_pool`; None: a new one.

        Raises: BadRequest: see `load`.
        """
        config = model.config
        self.config = config
        self.dtype = dtype
        self.vocab_size = config.vocab_size
        self.max_context_tokens = config.max_context_tokens
        torch_dtype = require_dtype(dtype)
        self.geometry = config.kv_geometry(block_size, torch_dtype.itemsize)
        self._kv_pool = make_pool(config, dtype, num_blocks, block_size) if pool is None else pool
        self._model = model
        self._adapters = adapters or {}
        self._attention = CpuAttention(self._kv_pool, config.num_heads)
        instruction_set = torch.backends.cpu.get_cpu_capability().lower()
        self.kv_layout = KV_LAYOUT
        self.numeric_class = f"{self._attention.name}-cpu-{instruction_set}-{dtype}"

    @staticmethod
    def load(
        folder: Path,
        dtype: str,
        num_blocks: int,
        block_size: int = 16,
        progress: Callable[[str], None] = lambda _line: None,
        shard: Shard = WHOLE,
        pool: torch.Tensor | None = None,
        gather: Gather = alone,
        adapters: Mapping[str, Path] | None = None,
    ) -> TorchModelRunner:
        """Read a model folder and make a pool of `num_blocks` blocks.

        Args:
            dtype: "float32" or "bfloat16", of weights and KV.
            progress: told of each layer read.
            shard, pool, gather: of one rank, where ranks share the model (engine/parallel/).
            adapters: folders, by their digests, as requests name them (SequenceSlice.adapter_digest).
        Raises: BadModel: the folder is damaged or of an unsupported kind. BadRequest: dtype or block_size.
        """
        config = ModelConfig.load(folder)
        weights = load_weights(folder, config, require_dtype(dtype), progress, shard)
        model = DecoderModel(shard.config(config), weights, CpuArithmetic(), gather)
        loaded = load_adapters(adapters or {}, config, require_dtype(dtype), shard)
        return TorchModelRunner(model, dtype, num_blocks, block_size, pool, loaded)

    @property
    def kv_pool(self) -> torch.Tensor:
        """[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous: a block is one run of bytes."""
        return self._kv_pool

    @property
    def kv_pools(self) -> tuple[torch.Tensor, ...]:
        """See ModelRunner."""
        return (self._kv_pool,)

    def run(self, plan: StepPlan) -> list[tuple[Answer, ...]]:
        """See ModelRunner."""
        self.check(plan)
        copy_blocks(self._kv_pool, plan.copies)
        with torch.inference_mode():
            answers = plan.by_slice(draw(self._compute(plan), plan.samples))
        clear_not_finite(self._kv_pool, self.geometry.block_size, plan, answers)
        return answers

    def follow(self, plan: StepPlan) -> None:
        """See ShardRunner."""
        copy_blocks(self._kv_pool, plan.copies)
        is_finite = torch.isfinite(self._compute(plan).amax(dim=-1)).tolist()
        answers = plan.by_slice(0 if finite else NOT_FINITE for finite in is_finite)
        clear_not_finite(self._kv_pool, self.geometry.block_size, plan, answers)

    def check(self, plan: StepPlan) -> None:
        """See LeadingRunner."""
        block_size, num_blocks = self.geometry.block_size, len(self._kv_pool)
        require_computable(plan, block_size, num_blocks, self.max_context_tokens, self.vocab_size, self._adapters)

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Compute a step, without its copies; next-token logits for each of its samples, in order.

        Returns: [num_samples, vocab_size], float32.
        Raises: InvariantBroken: see ModelRunner.run.
        """
        self.check(plan)
        return self._compute(plan)

    def _compute(self, plan: StepPlan) -> torch.Tensor:
        """Of a checked plan."""
        with torch.inference_mode():
            batch = self._attention_batch(plan.slices)
            token_ids = torch.tensor([token for item in plan.slices for token in item.token_ids])
            return self._model.logits(
                token_ids,
                batch.positions,
                self._attention.begin_step(batch),
                _sampled_rows(plan.slices),
                adapted_rows(plan.slices, self._adapters),
            )

    def _attention_batch(self, slices: Sequence[SequenceSlice]) -> AttentionBatch:
        """Flatten checked slices."""
        block_size = self.geometry.block_size
        most_blocks = max(len(item.block_table) for item in slices)
        tables = torch.tensor([item.block_table + (0,) * (most_blocks - len(item.block_table)) for item in slices])
        positions = torch.cat([torch.arange(item.start, item.end) for item in slices])
        owners = torch.repeat_interleave(torch.tensor([len(item.token_ids) for item in slices]))
        slots = tables[owners, positions // block_size] * block_size + positions % block_size
        return AttentionBatch(
            positions=positions,
            slot_mapping=slots,
            query_lens=tuple(len(item.token_ids) for item in slices),
            context_lens=tuple(item.end for item in slices),
            block_tables=tables,
        )


def make_pool(config: ModelConfig, dtype: str, num_blocks: int, block_size: int) -> torch.Tensor:
    """As `TorchModelRunner.kv_pool`, zero. Raises: BadRequest: on `dtype`."""
    shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
    return torch.zeros(shape, dtype=require_dtype(dtype))


def _sampled_rows(slices: Sequence[SequenceSlice]) -> torch.Tensor:
    """Index in the step of the token whose logits each sample is drawn from, int64."""
    rows, end = [], 0
    for item in slices:
        rows += [end + row for row in item.logit_rows]
        end += len(item.token_ids)
    return torch.tensor(rows, dtype=torch.int64)
