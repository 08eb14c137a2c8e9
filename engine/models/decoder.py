"""The forward pass of every family: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

What a family adds to query, key and value heads (engine/models/family.py) is there where its layers have the weights
for it. Residual stream, biases, norms, rotation, softmax and logits are float32 in either weight dtype; matrix products
run in the weights' dtype. Where ranks share a model, each has some rows of every matrix, and `gather` makes activations
whole before a product needs them.
Source: Llama, arXiv:2302.13971; RoPE, arXiv:2104.09864 (halves rotated, as Hugging Face stores it); normalised heads,
arXiv:2302.05442.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.adapter import AdaptedRows, AdapterLayer, LowRank
from engine.attention.backend import StepAttention
from engine.model_config import ModelConfig
from engine.models.arithmetic import Arithmetic
from engine.rope import rotary_tables
from engine.weights import LayerWeights, ModelWeights

# [num_rows, columns] of each rank to [num_rows, all columns], the same on all (engine/parallel/group.py).
Gather = Callable[[torch.Tensor], torch.Tensor]
Adapted = list[tuple[slice, AdapterLayer]]  # of a step's rows, in one layer
Angles = tuple[torch.Tensor, torch.Tensor]  # cosine and sine of each token's, [num_tokens, head_dim / 2], float32


def alone(part: torch.Tensor) -> torch.Tensor:
    """The Gather of one rank."""
    return part


class DecoderModel:
    """Weights and forward pass of one model, on the weights' device. Holds no KV: attention comes with each step."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, arithmetic: Arithmetic, gather: Gather = alone
    ) -> None:
        """config, weights: a rank's (engine/parallel/shard.py), or the whole model's."""
        self.config = config
        self._gather = gather
        self._weights = weights
        self._arithmetic = arithmetic
        device = weights.embedding.device
        self._cosine, self._sine = (table.to(device) for table in rotary_tables(config))

    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        rows: torch.Tensor,
        adapted_rows: AdaptedRows = (),
    ) -> torch.Tensor:
        """Compute one step and the logits that follow some of its tokens.

        Args:
            token_ids, positions: [num_tokens], int64.
            attention: made for exactly these tokens; their KV is written through it.
            rows: [num_rows], int64, tokens whose next-token logits are wanted; may be empty.
            adapted_rows: tokens that are computed with an adapter; the others are what they are without any.
        Returns: [num_rows, vocab_size], float32.
        """
        num_tokens = len(token_ids)
        residual = self._weights.embedding[self._pad_rows(token_ids)].float()
        angles = self._cosine[positions], self._sine[positions]
        for index, layer in enumerate(self._weights.layers):
            adapted = [(where, adapter[index]) for where, adapter in adapted_rows]
            residual += self._attention(index, layer, residual, num_tokens, angles, attention, adapted)
            residual += self._feed_forward(layer, residual, adapted)
        if not len(rows):  # the head is a quarter of the weights: not for nothing
            return residual.new_empty((0, self.config.vocab_size))
        hidden = self._norm(self._pad_rows(residual[rows]), self._weights.final_norm)
        return self._gather(self._arithmetic.linear(hidden, self._weights.head)[: len(rows)])

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        residual: torch.Tensor,
        num_tokens: int,
        angles: Angles,
        attention: StepAttention,
        adapted: Adapted,
    ) -> torch.Tensor:
        """What to add to `residual`, in the weights' dtype; rows past `num_tokens` are padding and have no KV."""
        queries, keys, values = self._heads(layer, residual, num_tokens, adapted)
        kv_dtype = layer.qkv.dtype
        attention.write_kv(index, self._arithmetic.rotate(keys, *angles).to(kv_dtype), values.to(kv_dtype))
        attended = attention.attend(index, self._arithmetic.rotate(queries, *angles))
        rows = self._pad_rows(self._gather(attended.view(num_tokens, -1).to(kv_dtype)))
        added = self._arithmetic.linear(rows, layer.output)
        return self._gather(self._adapt(added, rows, [(where, adapter.output) for where, adapter in adapted]))

    def _heads(
        self, layer: LayerWeights, residual: torch.Tensor, num_tokens: int, adapted: Adapted
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values before rotation, each [num_tokens, its heads, head_dim], float32."""
        config = self.config
        rows = self._norm(residual, layer.attention_norm)
        projected = self._arithmetic.linear(rows, layer.qkv)
        projected = self._adapt(projected, rows, [(where, adapter.qkv) for where, adapter in adapted])
        projected = projected[:num_tokens].float()
        if layer.qkv_bias is not None:  # added apart: a product that begins with the bias would round by its own batch
            projected = projected + layer.qkv_bias
        heads = projected.view(num_tokens, -1, config.head_dim)
        queries, keys, values = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = self._norm(queries, layer.query_norm), self._norm(keys, layer.key_norm)
        return queries, keys, values

    def _feed_forward(self, layer: LayerWeights, residual: torch.Tensor, adapted: Adapted) -> torch.Tensor:
        """What to add to `residual`, [num_rows, hidden_size], in the weights' dtype."""
        arithmetic = self._arithmetic
        rows = self._norm(residual, layer.feed_forward_norm)
        gated = arithmetic.linear(rows, layer.gate_up)
        gated = self._adapt(gated, rows, [(where, adapter.gate_up) for where, adapter in adapted])
        rows = self._gather(arithmetic.gate(gated).to(layer.down.dtype))
        added = arithmetic.linear(rows, layer.down)
        return self._gather(self._adapt(added, rows, [(where, adapter.down) for where, adapter in adapted]))

    def _adapt(
        self, products: torch.Tensor, rows: torch.Tensor, pairs: Sequence[tuple[slice, LowRank | None]]
    ) -> torch.Tensor:
        """Add to some rows of a projection of `rows` what their adapters make of them, in float32."""
        for where, pair in pairs:
            if pair is None:
                continue
            products = products.float()
            inputs = rows[where]
            shrunk = self._arithmetic.linear(self._pad_rows(inputs), pair.shrink)
            products[where] += self._arithmetic.linear(shrunk, pair.expand)[: len(inputs)]
        return products

    def _norm(self, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self._arithmetic.norm(rows, scale, self.config.rms_norm_eps)

    def _pad_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Append zero rows up to a multiple of the arithmetic's."""
        missing = -len(rows) % self._arithmetic.row_multiple
        return torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:])))) if missing else rows
