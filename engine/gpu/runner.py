"""Computes steps on a GPU.

One step:
1. lay the plan out on the host (engine/gpu/step_layout.py), which also decides: graph or eager;
2. copy the layout from pinned memory into the device's queue, and behind it a graph's replay or the model's kernels;
3. fetch the greedy choices, or the logits where more is asked for than those;
4. wait for the end of all that was queued, KV writes included.

Because of 4 `run` is as synchronous as the CPU runners: a block that a step filled is reported to hand-offs only after
`run` has returned (engine/loop.py), so no transfer can be posted before its bytes are in the device's memory.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import torch

from core.errors import BadRequest
from engine.adapter import AdaptedRows, AdapterWeights, adapted_rows, load_adapters
from engine.attention.backend import DeviceBatch
from engine.attention.paged import KV_LAYOUT
from engine.dtypes import DTYPES, require_dtype
from engine.gpu.attention import MakeAttention, attention_for
from engine.gpu.device import CudaDevice, Device
from engine.gpu.graphs import DecodeGraphs, StepOutput, compute
from engine.gpu.step_layout import GraphSizes, StepLayout, decode_buckets, lay_out
from engine.gpu.weights import to_device
from engine.model_config import ModelConfig
from engine.models.arithmetic import Arithmetic
from engine.models.decoder import DecoderModel, Gather, alone
from engine.parallel.shard import WHOLE, Shard
from engine.runner import clear_not_finite, copy_blocks
from engine.sampler import draw
from engine.slice_check import require_computable
from engine.step import NOT_FINITE, Answer, RowSpec, SequenceSlice, StepPlan
from engine.weights import ModelWeights, load_weights

EXACT_VARIABLE: Final = "TANDEM_EXACT"
MAX_GRAPH_SEQUENCES: Final = 256  # larger decode steps are eager: their kernels take longer than their launches


class DeviceArithmetic(Arithmetic, Protocol):
    name: str  # part of the numeric class


class GpuModelRunner:
    """A ModelRunner. Prefill chunks and decodes of one plan are computed together."""

    kv_layout = KV_LAYOUT

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        dtype: str,
        num_blocks: int,
        block_size: int,
        device: Device,
        make_attention: MakeAttention,
        arithmetic: DeviceArithmetic,
        *,
        max_graph_sequences: int = MAX_GRAPH_SEQUENCES,
        pool: torch.Tensor | None = None,
        gather: Gather = alone,
        adapters: Mapping[str, AdapterWeights] | None = None,
    ) -> None:
        """Use `load`; this is for other devices and kernels.

        config, weights: a rank's, or the whole model's; weights on any device, in `dtype`.
        make_attention: gets the KV pool. max_graph_sequences: 0 for none.
        pool: see `make_pool`; None: a new one. gather: see DecoderModel.
        """
        self.config = config
        self.dtype = dtype
        self.vocab_size = config.vocab_size
        self.max_context_tokens = config.max_context_tokens
        self.geometry = config.kv_geometry(block_size, DTYPES[dtype].itemsize)
        self._device = device
        self._num_blocks = num_blocks
        with device.stream():
            place = device.torch_device
            self._pool = make_pool(config, dtype, num_blocks, block_size, place) if pool is None else pool
        attention = make_attention(self._pool)
        self._attention = attention
        self.numeric_class = f"{attention.name}-{device.name}-{dtype}-{arithmetic.name}"
        table_width = min(num_blocks, -(-config.max_context_tokens // block_size))
        self.graph_sizes = GraphSizes(decode_buckets(max_graph_sequences) if max_graph_sequences else (), table_width)
        with device.stream(), torch.inference_mode():
            self._model = DecoderModel(config, to_device(weights, device.torch_device), arithmetic, gather)
            self._adapters = {
                digest: tuple(layer.changed(lambda tensor: tensor.to(device.torch_device)) for layer in adapter)
                for digest, adapter in (adapters or {}).items()
            }
            self.graphs = DecodeGraphs(device, self._model, attention, self.graph_sizes, block_size, num_blocks)
            self._warm_up()
            device.finish()

    @staticmethod
    def load(
        folder: Path,
        dtype: str,
        num_blocks: int,
        block_size: int = 16,
        progress: Callable[[str], None] = lambda _line: None,
        gpu_index: int = 0,
        shard: Shard = WHOLE,
        pool: torch.Tensor | None = None,
        gather: Gather = alone,
        adapters: Mapping[str, Path] | None = None,
    ) -> GpuModelRunner:
        """Read a model folder onto a GPU, counted round among those that torch sees, and make a pool there.

        shard, pool, gather: of one rank, where ranks share the model (engine/parallel/).
        adapters: folders, by their digests, as requests name them (SequenceSlice.adapter_digest).

        TANDEM_ATTENTION (engine/gpu/attention.py) and TANDEM_EXACT, "1" or "0", are read from the environment.

        Raises: BadModel: the folder is damaged or of an unsupported kind. BadRequest: dtype, block_size or a variable.
        """
        torch_dtype = require_dtype(dtype)
        exact = _exact()
        config = ModelConfig.load(folder)
        device = CudaDevice(gpu_index)
        part = shard.config(config)
        make_attention = attention_for(device, part, dtype, block_size, exact)
        weights = load_weights(folder, config, torch_dtype, progress, shard)
        loaded = load_adapters(adapters or {}, config, torch_dtype, shard)
        progress("capturing decode graphs")
        from engine.gpu.arithmetic import ExactArithmetic, GpuArithmetic  # Triton need not be there for other engines

        arithmetic = ExactArithmetic() if exact else GpuArithmetic()
        return GpuModelRunner(
            part,
            weights,
            dtype,
            num_blocks,
            block_size,
            device,
            make_attention,
            arithmetic,
            pool=pool,
            gather=gather,
            adapters=loaded,
        )

    @property
    def kv_pool(self) -> torch.Tensor:
        """[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], contiguous: a block is one run of bytes."""
        return self._pool[: self._num_blocks]

    @property
    def kv_pools(self) -> tuple[torch.Tensor, ...]:
        """See ModelRunner."""
        return (self.kv_pool,)

    def run(self, plan: StepPlan) -> list[tuple[Answer, ...]]:
        """See ModelRunner."""
        self.check(plan)
        with self._device.stream(), torch.inference_mode():
            copy_blocks(self.kv_pool, plan.copies)
            answers = plan.by_slice(_draw(self._compute(plan), plan.samples))
            clear_not_finite(self.kv_pool, self.geometry.block_size, plan, answers)
            self._device.finish()
        return answers

    def follow(self, plan: StepPlan) -> None:
        """See ShardRunner."""
        with self._device.stream(), torch.inference_mode():
            copy_blocks(self.kv_pool, plan.copies)
            greedy_ids: list[int] = self._compute(plan).greedy_ids.tolist()
            answers = plan.by_slice(NOT_FINITE if token_id == -1 else token_id for token_id in greedy_ids)
            clear_not_finite(self.kv_pool, self.geometry.block_size, plan, answers)
            self._device.finish()

    def check(self, plan: StepPlan) -> None:
        """See LeadingRunner."""
        block_size, num_blocks = self.geometry.block_size, self._num_blocks
        require_computable(plan, block_size, num_blocks, self.max_context_tokens, self.vocab_size, self._adapters)

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Compute a step, without its copies; next-token logits for each of its samples, in order.

        Returns: [num_samples, vocab_size], float32, on the host.
        Raises: InvariantBroken: see ModelRunner.run.
        """
        self.check(plan)
        with self._device.stream(), torch.inference_mode():
            logits = self._compute(plan).logits.cpu()
            self._device.finish()
        return logits

    def _compute(self, plan: StepPlan) -> StepOutput:
        """Queue a checked step, without its copies; a row for each of its samples, in order, on the device."""
        layout = lay_out(plan.slices, self.geometry.block_size, self._num_blocks, self.graph_sizes)
        if layout.bucket is None:
            return self._eager(layout, adapted_rows(plan.slices, self._adapters))
        output, rows = self.graphs.replay(layout), self._upload(layout.logit_rows)
        return StepOutput(output.logits[rows], output.greedy_ids[rows])

    def _warm_up(self) -> None:
        """A prefill into the scratch block: its kernels compile now, not in the first request."""
        slices = (SequenceSlice("warm-up", (0, 0), 0, (self._num_blocks, self._num_blocks)),)
        self._eager(lay_out(slices, self.geometry.block_size, self._num_blocks, self.graph_sizes))

    def _eager(self, layout: StepLayout, adapted: AdaptedRows = ()) -> StepOutput:
        batch = DeviceBatch(
            slot_mapping=self._upload(layout.slots),
            query_starts=self._upload(layout.query_starts),
            context_lens=self._upload(layout.context_lens),
            block_tables=self._upload(layout.block_tables).view(-1, layout.table_width),
            most_queries=layout.most_queries,
            most_context=layout.most_context,
        )
        token_ids, positions = self._upload(layout.token_ids), self._upload(layout.positions)
        rows = self._upload(layout.logit_rows)
        return compute(self._model, self._attention, token_ids, positions, batch, rows, adapted)

    def _upload(self, values: array[int]) -> torch.Tensor:
        return self._device.stage(values).to(self._device.torch_device, non_blocking=True)


def make_pool(config: ModelConfig, dtype: str, num_blocks: int, block_size: int, device: torch.device) -> torch.Tensor:
    """As `GpuModelRunner.kv_pool`, and one block more, for what padding rows write. Zeroed: stale contents must be
    finite."""
    shape = (num_blocks + 1, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
    return torch.zeros(shape, dtype=DTYPES[dtype], device=device)


def _draw(output: StepOutput, specs: Sequence[RowSpec]) -> Sequence[Answer]:
    """One token per row: the device's own choice where nothing else is asked for and all logits are finite.

    Else the host draws, from the logits, as for every other runner: equal logits give equal tokens on any device.
    """
    greedy_ids: list[int] = output.greedy_ids.tolist()
    if all(spec.is_plain_greedy for spec in specs) and -1 not in greedy_ids:
        return greedy_ids
    return draw(output.logits.cpu(), specs)


def _exact() -> bool:
    value = os.environ.get(EXACT_VARIABLE, "0")
    if value not in ("0", "1"):
        raise BadRequest(EXACT_VARIABLE, f"must be 0 or 1, got {value!r}")
    return value == "1"
