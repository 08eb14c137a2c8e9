"""What the NIXL engine keeps of each operation and each peer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from core.membership import WorkerRef
from kv_transfer.doorbell import BellAddress
from kv_transfer.pool import MemoryPool


class Completion(Protocol):
    """Where the outcome of a call goes; told exactly once."""

    def resolve(self, value: object) -> None: ...

    def fail(self, error: Exception) -> None: ...


@dataclass(slots=True)
class Peer:
    """One connected incarnation, as the engine keeps it."""

    ref: WorkerRef
    blocks: Any  # prepared descriptor list of the peer's pool
    scratch: MemoryPool
    bell: BellAddress
    rung_s: float = 0.0
    announced: bool = False
    lost: bool = False
    num_operations: int = 0
    drop_waiters: list[Completion] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.ref)

    @property
    def leaving(self) -> bool:
        return self.lost or bool(self.drop_waiters)


@dataclass(slots=True)
class Operation:
    """One posted transfer. Its handle lives until it settles."""

    peer: Peer
    handle: Any
    done: Completion
    posted_s: float
