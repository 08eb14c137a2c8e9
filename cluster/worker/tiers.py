"""A worker's cache tiers below its KV pool, built from its configuration (docs/adr/0030-cache-tiers.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.worker.config import WorkerConfig, slots_within
from core.errors import BadRequest
from engine.cache_tiers import CacheTiers
from engine.disk_slots import DiskSlots, require_room
from engine.host_slots import HostSlots
from engine.runner import ModelRunner
from engine.tier_driver import TierDriver


@dataclass(frozen=True, slots=True)
class Tiers:
    """The pool's decisions, and the memory and the file that they are about."""

    decisions: CacheTiers
    host: HostSlots
    disk: DiskSlots | None

    def driver(self, on_read: Callable[[], None]) -> TierDriver | None:
        """None: there is no disk to drive. Call it in the event loop."""
        return None if self.disk is None else TierDriver(self.decisions, self.host, self.disk, on_read)


def build_tiers(config: WorkerConfig, runner: ModelRunner) -> Tiers | None:
    """None where there are to be none. Raises: BadRequest: naming the setting, where its bytes hold no block, or the
    host or the folder has no room for them."""
    num_host_slots = slots_within("host_cache_bytes", config.host_cache_bytes, runner.geometry.block_bytes)
    num_disk_slots = slots_within("disk_cache_bytes", config.disk_cache_bytes, runner.geometry.block_bytes)
    if not num_host_slots:
        return None
    try:
        host = HostSlots(runner.kv_pools, num_host_slots)
    except OSError as error:
        raise BadRequest("host_cache_bytes", f"{config.host_cache_bytes} bytes: {error.strerror}") from error
    folder = config.disk_cache_folder
    disk = None if folder is None else _open_disk(folder, config.disk_cache_bytes, num_disk_slots, host.slot_bytes)
    return Tiers(CacheTiers(host, num_host_slots, num_disk_slots), host, disk)


def _open_disk(folder: Path, num_bytes: int, num_slots: int, slot_bytes: int) -> DiskSlots:
    require_room(folder, num_bytes, "one worker")
    try:
        return DiskSlots(folder, num_slots, slot_bytes)
    except OSError as error:  # a quota, a file's largest size, or another took the room meanwhile
        raise BadRequest("disk_cache_bytes", f"{num_bytes} bytes in {folder}: {error.strerror}") from error
