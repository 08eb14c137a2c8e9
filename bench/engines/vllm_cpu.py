"""vLLM's CPU build in one process: its LLMEngine, stepped here, without prefix caching.

`VLLM_ENABLE_V1_MULTIPROCESSING=0`, which bench/engine.py sets, keeps scheduler, worker and sampler in this process.
"""

from __future__ import annotations

import importlib
from typing import Any

from bench.engines.driver import Settings, serve

KV_BYTES_PER_TOKEN = {"bfloat16": 23040, "float32": 46080}  # of the default model
BLOCK_SIZE = 128  # its default on CPUs


class VllmEngine:
    def __init__(self, settings: Settings) -> None:
        vllm: Any = importlib.import_module("vllm")
        kinds: Any = importlib.import_module("vllm.sampling_params").RequestOutputKind
        budget = {"max_num_batched_tokens": settings.token_budget} if settings.token_budget else {}
        arguments = vllm.EngineArgs(
            model=settings.model,
            dtype=settings.dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=settings.max_context,
            max_num_seqs=settings.max_sequences,
            num_gpu_blocks_override=-(-settings.kv_tokens // BLOCK_SIZE),
            kv_cache_memory_bytes=settings.kv_tokens * KV_BYTES_PER_TOKEN[settings.dtype],
            disable_log_stats=True,
            **budget,
        )
        self._engine: Any = vllm.LLMEngine.from_engine_args(arguments)
        self._temperature = settings.temperature
        self._new_sampling: Any = vllm.SamplingParams
        self._delta = kinds.DELTA
        self._request_ids: set[str] = set()
        self.version = vllm.__version__

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        sampling = self._new_sampling(
            temperature=self._temperature,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._delta,
        )
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        self._request_ids.add(request_id)

    def step(self) -> list[str]:
        grown = []
        for output in self._engine.step():
            grown += [output.request_id] * len(output.outputs[0].token_ids)
            if output.finished:
                self._request_ids.discard(output.request_id)
        return grown

    def clear(self) -> None:
        if self._request_ids:
            self._engine.abort_request(list(self._request_ids))
        self._request_ids.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()


if __name__ == "__main__":
    serve(VllmEngine)
