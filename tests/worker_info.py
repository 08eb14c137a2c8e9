"""What a worker says of itself, where a test does not care about most of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core.membership import Role, WorkerInfo, WorkerRef


def worker_info(ref: WorkerRef, role: Role = Role.DECODE, **fields: Any) -> WorkerInfo:
    """fields: of WorkerInfo, that matter."""
    info = WorkerInfo(
        ref,
        role,
        address=f"{ref.worker_id}:1",
        identity_digest=b"id",
        block_size=16,
        block_bytes=1024,
        num_blocks=100,
        max_context_tokens=1024,
    )
    return replace(info, **fields)
