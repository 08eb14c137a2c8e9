"""One Ray for all tests that need one: a start takes seconds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from cluster import processes
from cluster.folders import ray_folder
from cluster.ray_runtime import RayRuntime


@pytest.fixture(scope="session")
def ray_runtime() -> Iterator[RayRuntime]:
    """A running Ray; afterwards nothing of it is left."""
    with ray_folder() as folder:
        runtime = RayRuntime.private(3, folder)
        asyncio.run(runtime.start(timeout_s=60.0))
        yield runtime
        own = {it for it in processes.descendants(os.getpid()) if str(folder) in processes.command_of(it)}
        below = own.union(*(processes.descendants(it.pid) for it in own))
        assert own
        asyncio.run(runtime.stop(timeout_s=20.0))
    left = asyncio.run(processes.wait_gone(below, timeout_s=10.0))
    assert not left, [processes.command_of(process) for process in left]
