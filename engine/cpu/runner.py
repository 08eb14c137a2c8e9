"""Computes steps with our own C++ kernels: one core, one call per step, exact to the bit in every batch and chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Final

import numpy as np
import torch

from core.errors import BadRequest, InvariantBroken
from engine.adapter import AdapterWeights, load_adapters
from engine.cpu.build import KernelsUnavailable, build_library
from engine.cpu.library import Int32Array, KernelEngine, KernelLibrary, block_dtype
from engine.cpu.memory import HugeMemory
from engine.cpu.packing import has_blocks, pack_adapter, pack_weights, pad_columns
from engine.dtypes import DTYPES, require_dtype
from engine.model_config import ModelConfig
from engine.runner import clear_not_finite, copy_blocks
from engine.sampler import draw
from engine.slice_check import require_copies, require_covered, require_inside
from engine.step import NOT_FINITE, PROBE, Answer, SequenceSlice, StepPlan
from engine.weights import StoredWeights, load_stored_weights

PAGE_TOKENS: Final = 16
NUM_LANES: Final = 16
KV_LAYOUTS: Final = {  # part of the cache identity: what lies where in a block (kernels/kv_pool.h)
    "float32": "block,layer,key-value,head,key:dim-token,value:token-dim",
    "bfloat16": "block,layer,key-value,head,key:dim/2-token-2,value:token/2-dim-2",
}


class CpuModelRunner:
    """A ModelRunner. Prefill chunks and decodes of one plan are computed together.

    A token's logits are the same to the bit however its sequence was cut into chunks, batched or placed in the pool.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: StoredWeights,
        dtype: str,
        num_blocks: int,
        block_size: int,
        library: KernelLibrary,
        adapters: Mapping[str, AdapterWeights] | None = None,
    ) -> None:
        """Use `load`; this is for models that are already in memory. Raises: see `load`."""
        require_supported(config, dtype, block_size)
        self.config = config
        self.dtype = dtype
        self.vocab_size = config.vocab_size
        self.max_context_tokens = config.max_context_tokens
        self.geometry = config.kv_geometry(block_size, DTYPES[dtype].itemsize)
        self.kv_layout = KV_LAYOUTS[dtype]
        blocks_as = block_dtype(library.instruction_set, DTYPES[dtype])
        unrounded = blocks_as != DTYPES[dtype] and has_blocks(weights)
        self.numeric_class = _numeric_class(library.instruction_set, dtype, unrounded=unrounded)
        self._kv_pool = HugeMemory(num_blocks * self.geometry.block_bytes).tensor(
            (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size * config.head_dim), DTYPES[dtype]
        )
        packed_adapters = [pack_adapter(adapter, DTYPES[dtype]) for adapter in (adapters or {}).values()]
        self._adapters = {"": -1} | {digest: index for index, digest in enumerate(adapters or {})}
        packed = pack_weights(weights, DTYPES[dtype], blocks_as)
        self._engine = KernelEngine(library, config, packed, self._kv_pool, packed_adapters)
        self._logits = torch.empty((0, pad_columns(config.vocab_size)))

    @staticmethod
    def load(
        folder: Path,
        dtype: str,
        num_blocks: int,
        block_size: int = PAGE_TOKENS,
        progress: Callable[[str], None] = lambda _line: None,
        *,
        unpack: bool = False,
        adapters: Mapping[str, Path] | None = None,
    ) -> CpuModelRunner:
        """Read a model folder, compile the kernels if need be, and make a pool of `num_blocks` blocks.

        Args:
            dtype: "float32" or "bfloat16", of weights and KV.
            progress: told of each layer read.
            unpack: hold quantised weights as floats of `dtype`: the same logits to the bit where the numeric class is
                the same, from more memory.
            adapters: folders, by their digests, as requests name them (SequenceSlice.adapter_digest).
        Raises: BadModel: the folder is damaged or of an unsupported kind. BadRequest: dtype or block_size.
            KernelsUnavailable: they cannot be built here, or do not take the model's sizes.
        """
        config = ModelConfig.load(folder)
        require_supported(config, dtype, block_size)
        library = KernelLibrary(build_library())
        weights = load_stored_weights(folder, config, DTYPES[dtype], progress, unpack=unpack)
        loaded = load_adapters(adapters or {}, config, DTYPES[dtype])
        return CpuModelRunner(config, weights, dtype, num_blocks, block_size, library, loaded)

    @property
    def kv_pool(self) -> torch.Tensor:
        """[num_blocks, num_layers, 2, num_kv_heads, block_size * head_dim], contiguous: a block is one run of bytes.
        The order inside a page is `kv_layout`'s."""
        return self._kv_pool

    @property
    def kv_pools(self) -> tuple[torch.Tensor, ...]:
        """See ModelRunner."""
        return (self._kv_pool,)

    def run(self, plan: StepPlan) -> list[tuple[Answer, ...]]:
        """See ModelRunner."""
        require_copies(plan, len(self._kv_pool))
        copy_blocks(self._kv_pool, plan.copies)
        samples = plan.samples
        only_probes = all(spec is PROBE for spec in samples)
        greedy_ids = self._compute(plan.slices, only_probes=only_probes).tolist()
        # The kernels' own choice where nothing else is asked for and all logits are finite.
        if all(spec.is_plain_greedy for spec in samples) and -1 not in greedy_ids:
            return plan.by_slice(greedy_ids)
        if only_probes:
            answers = plan.by_slice(NOT_FINITE if token_id == -1 else token_id for token_id in greedy_ids)
        else:
            with torch.inference_mode():
                answers = plan.by_slice(draw(self._logits[: len(samples), : self.vocab_size], samples))
        clear_not_finite(self._kv_pool, PAGE_TOKENS, plan, answers)
        return answers

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Compute a step, without its copies; next-token logits for each of its samples, in order.

        Returns: [num_samples, vocab_size], float32, good until the next step.
        Raises: InvariantBroken: see ModelRunner.run.
        """
        num_rows = len(self._compute(plan.slices, only_probes=False))
        return self._logits[:num_rows, : self.vocab_size]

    def _compute(self, slices: Sequence[SequenceSlice], *, only_probes: bool) -> Int32Array:
        """Fill the first rows of `_logits`, one for each sample of the slices, unless these are `only_probes`.

        Returns: the greedy choice of each, or for probes 0; -1 where a logit is not finite.
        """
        token_ids = _flat([item.token_ids for item in slices])
        block_ids = _flat([item.block_table for item in slices])
        self._check(slices, token_ids, block_ids)
        lengths = [len(item.token_ids) for item in slices]
        ends = list(accumulate(lengths))
        logit_rows = [
            end - len(item.token_ids) + row for item, end in zip(slices, ends, strict=True) for row in item.logit_rows
        ]
        if len(self._logits) < len(logit_rows):
            self._logits = torch.empty((len(logit_rows), self._logits.shape[1]))
        return self._engine.run(
            token_ids=token_ids,
            starts=[item.start for item in slices],
            lengths=lengths,
            table_lengths=[len(item.block_table) for item in slices],
            block_ids=block_ids,
            adapters=[self._adapters[item.adapter_digest] for item in slices],
            logit_rows=logit_rows,
            logits=self._logits,
            only_probes=only_probes,
        )

    def _check(self, slices: Sequence[SequenceSlice], token_ids: Int32Array, block_ids: Int32Array) -> None:
        """Raise InvariantBroken where a slice would read or write outside its own blocks, the pool or the tables."""
        for item in slices:
            require_covered(item, PAGE_TOKENS, self.max_context_tokens)
            if item.adapter_digest not in self._adapters:
                raise InvariantBroken(f"request {item.request_id}: its adapter is not loaded")
            if item.logit_rows != sorted(item.logit_rows):
                raise InvariantBroken(f"request {item.request_id}: samples are not in the order of their rows")
        # All at once, which is much faster than one by one; those are asked only to name the guilty one.
        if _outside(block_ids, len(self._kv_pool)) or _outside(token_ids, self.vocab_size):
            for item in slices:
                require_inside(item, PAGE_TOKENS, len(self._kv_pool), self.max_context_tokens, self.vocab_size)


def require_supported(config: ModelConfig, dtype: str, block_size: int) -> None:
    """Raise BadRequest or KernelsUnavailable naming what the kernels do not take."""
    require_dtype(dtype)
    if block_size != PAGE_TOKENS:
        raise BadRequest("block_size", f"the CPU kernels need {PAGE_TOKENS}, got {block_size}")
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(config, name) % NUM_LANES:
            raise KernelsUnavailable(f"{name} {getattr(config, name)} is no multiple of {NUM_LANES}")


def _numeric_class(instruction_set: str, dtype: str, *, unrounded: bool) -> str:
    """float32 results do not depend on whether bfloat16 instructions are there; bfloat16 results depend on whether
    blocks are rounded to it (kernels/quantised.h)."""
    if dtype == "float32":
        instruction_set = instruction_set.removesuffix("bf16")
    return f"cpu-{instruction_set}-{dtype}{'-blocks' if unrounded else ''}"


def _flat(rows: Sequence[tuple[int, ...]]) -> Int32Array:
    """Raises: OverflowError: a number does not fit."""
    return np.fromiter(chain.from_iterable(rows), np.int32, sum(map(len, rows)))


def _outside(ids: Int32Array, bound: int) -> bool:
    """A negative one is a huge one without its sign."""
    return bool(len(ids)) and int(ids.view(np.uint32).max()) >= bound
