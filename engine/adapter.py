"""LoRA adapters: low-rank products that are added to a model's projections for the requests that name them.

A projection y = W x becomes W x + (scale B)(A x). Projections that we stack (query, key and value; gate and up) have
one pair for all: the As one upon the other, the Bs along a diagonal. Source: LoRA, arXiv:2106.09685.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from core.errors import BadModel
from engine.adapter_config import CONFIG_FILE, TARGETS, TENSOR_FILE, AdapterConfig
from engine.model_config import ModelConfig
from engine.parallel.shard import WHOLE, Shard
from engine.quantisation import is_finite
from engine.step import SequenceSlice
from engine.tensor_files import TensorFiles
from engine.weights import expected_shapes

PREFIX: Final = "base_model.model."  # PEFT's, before the name that a tensor has in the model


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one projection: shrink [rank, num_inputs], expand [num_outputs, rank] with the scale in it."""

    shrink: torch.Tensor
    expand: torch.Tensor


@dataclass(frozen=True, slots=True)
class AdapterLayer:
    """Of one decoder layer, as engine.weights.Layer stacks it; None where the adapter changes nothing."""

    qkv: LowRank | None
    output: LowRank | None
    gate_up: LowRank | None
    down: LowRank | None

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> AdapterLayer:
        """The same of other tensors."""
        pairs = (self.qkv, self.output, self.gate_up, self.down)
        return AdapterLayer(*(pair and LowRank(change(pair.shrink), change(pair.expand)) for pair in pairs))


AdapterWeights = tuple[AdapterLayer, ...]
AdaptedRows = Sequence[tuple[slice, AdapterWeights]]  # of a step's tokens


def load_adapters(
    folders: Mapping[str, Path], config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE
) -> dict[str, AdapterWeights]:
    """Read the adapters of a model, by their content digests (engine/digest.py).

    Raises: BadModel: see `load_adapter`.
    """
    return {digest: load_adapter(folder, config, dtype, shard) for digest, folder in folders.items()}


def load_adapter(folder: Path, config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE) -> AdapterWeights:
    """Read a folder in PEFT's form: adapter_config.json and adapter_model.safetensors.

    config: the whole model's. shard: of a rank, which has all rows of each `shrink`, and of `expand` those that it has
    of the model's matrix.

    Raises: BadModel: unreadable, of a kind that we do not compute, or for another model; a tensor is missing, left
        over, of a wrong shape, or holds NaN or infinity.
    """
    adapter = AdapterConfig.load(folder)
    tensors = TensorFiles(folder, TENSOR_FILE, asked_by=f"the base model with {CONFIG_FILE}")
    reader = _Reader(folder, adapter, tensors, expected_shapes(config), dtype, shard)
    tensors.check(reader.wanted(config.num_layers), {})
    return tuple(
        AdapterLayer(
            qkv=reader.pair(index, ("q_proj", "k_proj", "v_proj")),
            output=reader.pair(index, ("o_proj",)),
            gate_up=reader.pair(index, ("gate_proj", "up_proj")),
            down=reader.pair(index, ("down_proj",)),
        )
        for index in range(config.num_layers)
    )


def adapted_rows(slices: Sequence[SequenceSlice], adapters: Mapping[str, AdapterWeights]) -> AdaptedRows:
    """Which of a step's tokens which adapter changes, in order; neighbours with one adapter are one slice of rows."""
    found: list[tuple[slice, str]] = []
    end = 0
    for item in slices:
        first, end = end, end + len(item.token_ids)
        if not item.adapter_digest:
            continue
        if found and found[-1][0].stop == first and found[-1][1] == item.adapter_digest:
            first = found.pop()[0].start
        found.append((slice(first, end), item.adapter_digest))
    return [(rows, adapters[digest]) for rows, digest in found]


@dataclass(frozen=True, slots=True)
class _Reader:
    folder: Path
    adapter: AdapterConfig
    tensors: TensorFiles
    base_shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    shard: Shard

    def wanted(self, num_layers: int) -> dict[str, tuple[int, ...]]:
        """The tensors that must be there, with their shapes."""
        shapes: dict[str, tuple[int, ...]] = {}
        for index in range(num_layers):
            for target in self.adapter.targets:
                num_outputs, num_inputs = self.base_shapes[f"{_module(index, target)}.weight"]
                shapes[_tensor(index, target, "A")] = (self.adapter.rank, num_inputs)
                shapes[_tensor(index, target, "B")] = (num_outputs, self.adapter.rank)
        return shapes

    def pair(self, index: int, targets: Sequence[str]) -> LowRank | None:
        """Of projections that are stacked."""
        adapted = [target for target in targets if target in self.adapter.targets]
        if not adapted:
            return None
        shrink = torch.cat([self.tensors.read(_tensor(index, target, "A"), torch.float32) for target in adapted])
        expand = torch.block_diag(*(self._expand(index, target) for target in targets))
        pair = LowRank(shrink.to(self.dtype), expand.to(self.dtype).contiguous())
        if not (is_finite(pair.shrink) and is_finite(pair.expand)):
            raise BadModel(f"{self.folder}: layer {index}: too large for {self.dtype}, lora_alpha in it")
        return pair

    def _expand(self, index: int, target: str) -> torch.Tensor:
        """[num_outputs, rank]; without columns where the adapter leaves the projection alone."""
        rows = self.shard.rows(self.base_shapes[f"{_module(index, target)}.weight"][0])
        if target in self.adapter.targets:
            return self.tensors.read(_tensor(index, target, "B"), torch.float32)[rows] * self.adapter.scale
        return torch.zeros(rows.stop - rows.start, 0)


def _module(index: int, target: str) -> str:
    return f"model.layers.{index}.{TARGETS[target]}.{target}"


def _tensor(index: int, target: str, half: str) -> str:
    return f"{PREFIX}{_module(index, target)}.lora_{half}.weight"
