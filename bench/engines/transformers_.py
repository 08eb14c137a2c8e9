"""transformers as one would write a server on it by hand: a static batch over `forward`, and the sampler in torch.

It has no scheduler of its own here: what is added to an idle engine is prefilled as one batch (equal lengths), and what
comes while that decodes is prefilled whole, alone, before the next step, for one token.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch

from bench.engines.driver import Settings, serve


@dataclass
class Batch:
    names: list[str]
    next_ids: torch.Tensor
    cache: Any


class TransformersEngine:
    def __init__(self, settings: Settings) -> None:
        transformers: Any = importlib.import_module("transformers")
        dtype = getattr(torch, settings.dtype)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype).eval()
        self._temperature = settings.temperature
        self._waiting: list[tuple[str, list[int], int]] = []
        self._batch: Batch | None = None
        self.version = transformers.__version__

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self._waiting.append((request_id, prompt, max_tokens))

    @torch.inference_mode()
    def step(self) -> list[str]:
        if self._waiting:
            return self._prefill()
        assert self._batch is not None
        batch = self._batch
        batch.next_ids = self._forward(batch.next_ids, batch.cache)
        return list(batch.names)

    def clear(self) -> None:
        self._batch = None

    def _prefill(self) -> list[str]:
        names = [name for name, _, _ in self._waiting]
        prompts = torch.tensor([prompt for _, prompt, _ in self._waiting])
        goes_on = self._waiting[0][2] > 1
        self._waiting.clear()
        output = self._model(prompts, use_cache=True, logits_to_keep=1)
        batch = Batch(names, self._sample(output.logits), output.past_key_values)
        if goes_on:
            assert self._batch is None
            self._batch = batch
        return names

    def _forward(self, token_ids: torch.Tensor, cache: Any) -> torch.Tensor:
        return self._sample(self._model(token_ids, past_key_values=cache, use_cache=True).logits)

    def _sample(self, logits: torch.Tensor) -> torch.Tensor:
        """[sequences, 1, vocabulary] -> [sequences, 1] ids. The ids are read, as a server must."""
        logits = logits[:, -1]
        if self._temperature == 0.0:
            next_ids = logits.argmax(-1, keepdim=True)
        else:
            next_ids = torch.multinomial(torch.softmax(logits.float() / self._temperature, -1), 1)
        next_ids.tolist()
        return next_ids


if __name__ == "__main__":
    serve(TransformersEngine)
