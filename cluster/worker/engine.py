"""A worker's model, KV pool and scheduler, built from its configuration. Slow: call it in a thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from cluster.worker.config import WorkerConfig
from cluster.worker.tiers import Tiers, build_tiers
from core.errors import RankLost
from core.identity import SCHEMA_REVISION, Adapter, CacheIdentity
from core.request import GenerateRequest
from engine.adapter_check import require_finite
from engine.block_pool import BlockPool
from engine.digest import read_adapters, tokenizer_digest, unchanged, weights_digest
from engine.grammar import GrammarCompiler
from engine.load_runner import load_runner
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.sequence import ModelLimits, StopWatch
from engine.stop_watch import TextStopWatch
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """What every role of a worker stands on."""

    runner: ModelRunner
    pool: BlockPool
    scheduler: Scheduler
    grammars: GrammarCompiler
    identity: CacheIdentity
    block_bytes: int
    adapters: frozenset[Adapter]
    tiers: Tiers | None


def build_engine(config: WorkerConfig, on_rank_lost: Callable[[RankLost], None] = lambda _lost: None) -> Engine:
    """Load weights and tokenizer. Raises BadModel, BadRequest or RankLost naming what cannot be served.

    on_rank_lost: see ParallelRunner.
    """
    with unchanged([config.model_folder, *config.adapters.values()]):
        return _build(config, on_rank_lost)


def _build(config: WorkerConfig, on_rank_lost: Callable[[RankLost], None]) -> Engine:
    folder = config.model_folder
    tokenizer = Tokenizer.load(folder)
    adapters = read_adapters(config.adapters)
    adapter_folders = {adapter.digest: config.adapters[name] for name, adapter in adapters.items()}
    runner = load_runner(
        folder,
        config.dtype,
        config.num_blocks,
        config.block_size,
        progress=lambda line: logger.info("%s", line),
        gpu_index=config.gpu_index,
        unpack=config.unpack_weights,
        tensor_parallel_size=config.tensor_parallel_size,
        on_rank_lost=on_rank_lost,
        adapters=adapter_folders,
    )
    require_finite(runner, adapter_folders)
    identity = _identity(config, runner)

    def watch(request: GenerateRequest) -> StopWatch:
        return TextStopWatch(request.stop, tokenizer.decoder())

    tiers = build_tiers(config, runner)
    pool = BlockPool(config.num_blocks, tiers.decisions if tiers else None)
    limits = ModelLimits(config.block_size, runner.max_context_tokens, tuple(tokenizer.eos_token_ids))
    grammars = GrammarCompiler(tokenizer, runner.vocab_size)
    scheduler = Scheduler(
        config.scheduling, pool, limits, identity.digest(), watch, grammars.matcher, adapters.values()
    )
    return Engine(
        runner, pool, scheduler, grammars, identity, runner.geometry.block_bytes, frozenset(adapters.values()), tiers
    )


def _identity(config: WorkerConfig, runner: ModelRunner) -> CacheIdentity:
    geometry = runner.geometry
    return CacheIdentity(
        schema_revision=SCHEMA_REVISION,
        weights_digest=weights_digest(config.model_folder),
        tokenizer_digest=tokenizer_digest(config.model_folder),
        kv_dtype=config.dtype,
        kv_layout=runner.kv_layout,
        block_size=geometry.block_size,
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        tensor_parallel_size=config.tensor_parallel_size,
        numeric_class=runner.numeric_class,
    )
