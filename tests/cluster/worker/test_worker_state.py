"""What a worker says of itself when it is scraped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cluster.worker.state import read_state
from core.messages import WorkerLoad
from engine.block_pool import BlockPool
from kv_transfer.prefix_index import IndexStats
from kv_transfer.transport import TransportStats


def test_requests_that_run_are_open_as_those_that_wait_are() -> None:
    load = WorkerLoad(
        waiting_requests=2, running_requests=8, waiting_tokens=0, free_blocks=1, used_blocks=1, quarantined_blocks=0
    )
    scheduler = SimpleNamespace(load=lambda: load, num_preemptions=0)
    engine: Any = SimpleNamespace(scheduler=scheduler, pool=BlockPool(4), block_bytes=16)
    transfer: Any = SimpleNamespace(transport=SimpleNamespace(stats=TransportStats), handoffs=())
    index: Any = SimpleNamespace(stats=IndexStats())
    assert read_state(engine, transfer, index, 3, 0, 0.0, None).open_requests == 13
