"""llama.cpp's library in one process, by its C interface, with the batching of its server.

A step is one `llama_decode`: the next token of each sequence that decodes, then prompt tokens in order of arrival up to
the budget, by rising slot, as it splits a batch where slots do not rise. Each slot has its own KV cache (one for all,
and no flash attention, were slower here), of float16 (its default; bfloat16 was slower); no prefix is looked for in it.

    python -m bench.engines.llama_cpp SHIPPED.gguf NEW.gguf q4_0|bf16     # requantises a model, and ends
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engines.driver import Settings, serve

DEFAULT_TOKEN_BUDGET = 512  # its default micro-batch: more is computed in turns
SLOT_TOKENS = 2304  # room for the longest prompt
FILE_TYPES = {"q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0", "bf16": "LLAMA_FTYPE_MOSTLY_BF16"}


@dataclass
class Running:
    """tokens: known and not yet computed. start: position of the first of them."""

    slot: int
    tokens: list[int]
    start: int
    left: int
    decoding: bool = False


class LlamaEngine:
    def __init__(self, settings: Settings) -> None:
        library: Any = importlib.import_module("llama_cpp")
        self._library = library
        library.llama_backend_init()
        self._budget = settings.token_budget or DEFAULT_TOKEN_BUDGET
        model = library.llama_model_load_from_file(settings.model.encode(), library.llama_model_default_params())
        self._context = library.llama_init_from_model(model, self._parameters(settings))
        if not self._context:
            raise RuntimeError(f"llama.cpp did not take {settings.model}")
        self._memory = library.llama_get_memory(self._context)
        self._sampler = self._make_sampler(settings.temperature)
        self._batch = library.llama_batch_init(self._budget, 0, 1)
        self._running: dict[str, Running] = {}
        self._free_slots = list(range(settings.max_sequences))
        self.version = f"llama-cpp-python {library.__version__}"

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self._running[request_id] = Running(self._free_slots.pop(0), list(prompt), 0, max_tokens)

    def step(self) -> list[str]:
        rows = self._plan()
        if self._library.llama_decode(self._context, self._batch):
            raise RuntimeError("llama_decode failed")
        for name, row in rows.items():
            self._advance(name, self._library.llama_sampler_sample(self._sampler, self._context, row))
        return list(rows)

    def clear(self) -> None:
        for name in list(self._running):
            self._end(name)

    def _parameters(self, settings: Settings) -> Any:
        parameters = self._library.llama_context_default_params()
        parameters.n_ctx = SLOT_TOKENS * settings.max_sequences
        parameters.n_batch = parameters.n_ubatch = self._budget
        parameters.n_seq_max = settings.max_sequences
        parameters.n_threads = parameters.n_threads_batch = 1
        parameters.kv_unified = False
        parameters.flash_attn_type = self._library.LLAMA_FLASH_ATTN_TYPE_ENABLED
        return parameters

    def _make_sampler(self, temperature: float) -> Any:
        library = self._library
        chain = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
        if temperature == 0.0:
            library.llama_sampler_chain_add(chain, library.llama_sampler_init_greedy())
        else:
            library.llama_sampler_chain_add(chain, library.llama_sampler_init_temp(temperature))
            library.llama_sampler_chain_add(chain, library.llama_sampler_init_dist(0))
        return chain

    def _plan(self) -> dict[str, int]:
        """Fill the batch. Returns: for each sequence whose end is in it, the row to sample from."""
        self._batch.n_tokens = 0
        rows = {}
        for name, item in sorted(self._running.items(), key=lambda pair: (not pair[1].decoding, pair[1].slot)):
            chunk = item.tokens[: self._budget - self._batch.n_tokens]
            for offset, token_id in enumerate(chunk):
                self._put(token_id, item.start + offset, item.slot)
            item.start += len(chunk)
            del item.tokens[: len(chunk)]
            if chunk and not item.tokens:
                rows[name] = self._batch.n_tokens - 1
                self._batch.logits[rows[name]] = 1
        return rows

    def _put(self, token_id: int, position: int, slot: int) -> None:
        batch, row = self._batch, self._batch.n_tokens
        batch.token[row] = token_id
        batch.pos[row] = position
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = slot
        batch.logits[row] = 0
        batch.n_tokens = row + 1

    def _advance(self, name: str, token_id: int) -> None:
        item = self._running[name]
        item.tokens.append(token_id)
        item.decoding = True
        item.left -= 1
        if not item.left:
            self._end(name)

    def _end(self, name: str) -> None:
        item = self._running.pop(name)
        self._library.llama_memory_seq_rm(self._memory, item.slot, -1, -1)
        self._free_slots = sorted([*self._free_slots, item.slot])


def requantise(source: Path, target: Path, file_type: str) -> None:
    library: Any = importlib.import_module("llama_cpp")
    parameters = library.llama_model_quantize_default_params()
    parameters.nthread = 1
    parameters.ftype = getattr(library, FILE_TYPES[file_type])
    parameters.allow_requantize = True
    if library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters)):
        raise RuntimeError(f"llama.cpp did not requantise {source}")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        requantise(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    else:
        serve(LlamaEngine)
