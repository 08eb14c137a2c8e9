"""What only the NIXL backend does: metadata checks, the probe's report, an owner thread that never dies silently."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from transport_ends import IDENTITY, End, Ends, connect, described, until

from core.errors import InvariantBroken, PeerRefused
from core.membership import WorkerRef
from kv_transfer.nixl import NixlTransport
from kv_transfer.nixl_probe import (
    LANE_GPU_MEMORY,
    LANE_LOOPBACK,
    LANE_MEMORY,
    LANE_RDMA,
    LANE_TCP,
    Envelope,
    Probe,
    infer_path,
    network_bytes_sent,
)
from kv_transfer.polling import PollingPeriods
from kv_transfer.pool import MemoryPool


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    made = Ends("nixl")
    yield made
    await made.close()


def envelope(end: End) -> Envelope:
    return Envelope.decode(end.transport.describe().agent_metadata)


async def test_metadata_that_is_not_the_peers_is_refused(ends: Ends) -> None:
    source, target, other = (ends.make(name) for name in ("prefill-0", "decode-0", "decode-1"))
    whole = envelope(target)
    scratch = (whole.scratch_address, whole.scratch_bytes, whole.host, whole.bell)
    wrong = {
        "empty": b"",
        "no envelope": whole.metadata,
        "no metadata": Envelope(*scratch, b"").encode(),
        "garbage": Envelope(*scratch, b"\xff" * 300).encode(),
        "cut": Envelope(*scratch, whole.metadata[:100]).encode(),
        "another worker's": other.transport.describe().agent_metadata,
        "our own": source.transport.describe().agent_metadata,
    }
    for what, metadata in wrong.items():
        with pytest.raises(PeerRefused) as refused:
            await connect(source, target, agent_metadata=metadata)
        assert refused.value.field == "agent_metadata", what
    await connect(source, target)


async def test_scratch_that_is_not_registered_is_refused(ends: Ends) -> None:
    source, target = ends.make("prefill-0"), ends.make("decode-0")
    whole = envelope(target)
    with pytest.raises(PeerRefused) as refused:
        moved = replace(whole, scratch_address=whole.scratch_address + (1 << 30))
        await connect(source, target, agent_metadata=moved.encode())
    assert refused.value.field == "agent_metadata"
    await connect(source, target)


async def test_a_pool_outside_what_is_registered_is_refused(ends: Ends) -> None:
    source, target = ends.make("prefill-0"), ends.make("decode-0")
    [base_address] = described(target).pool.base_addresses
    for claim in ({"num_blocks": 1 << 20}, {"base_addresses": (base_address + 4096,)}, {"num_blocks": 0}):
        with pytest.raises(PeerRefused) as refused:
            await connect(source, target, **claim)
        assert refused.value.field == "base_addresses"
    await connect(source, target)


async def test_the_probe_reports_its_speed(ends: Ends) -> None:
    source, target = ends.make("prefill-0"), ends.make("decode-0")
    link = await source.transport.connect(target.transport.describe())
    assert link.lane in (LANE_MEMORY, LANE_LOOPBACK)
    assert link.probe_gbps > 0.01


@pytest.mark.parametrize(
    ("same_host", "memory_kind", "network_bytes", "seconds", "expected"),
    [
        (True, "DRAM", [0, 200, 90], 2.0, (LANE_MEMORY, 0.5)),
        (True, "VRAM", [0, 200, 90], 0.01, (LANE_GPU_MEMORY, 100.0)),
        (True, "DRAM", [3 * 10**9, 100, 2 * 10**9], 0.1, (LANE_MEMORY, 10.0)),  # other traffic beside it
        (True, "DRAM", [10**9 + 5000] * 3, 0.1, (LANE_LOOPBACK, 10.0)),
        (True, "VRAM", [10**9 + 5000] * 3, 0.1, (LANE_LOOPBACK, 10.0)),
        (False, "DRAM", [10**9] * 3, 1.0, (LANE_TCP, 1.0)),
        (False, "VRAM", [0] * 3, 0.025, (LANE_RDMA, 40.0)),  # it passes no interface of the kernel
    ],
)
def test_the_path_is_inferred(
    same_host: bool, memory_kind: str, network_bytes: list[int], seconds: float, expected: tuple[str, float]
) -> None:
    assert infer_path(same_host, memory_kind, 10**9, [Probe(seconds, sent) for sent in network_bytes]) == expected


def test_one_slow_probe_does_not_change_the_speed() -> None:
    probes = [Probe(seconds, 0) for seconds in (0.1, 0.1, 5.0, 0.1, 0.1)]
    assert infer_path(True, "DRAM", 10**9, probes)[1] == pytest.approx(10.0)


def test_what_passes_loopback_is_counted() -> None:
    before = network_bytes_sent()
    left, right = socket.socket(), socket.create_server(("127.0.0.1", 0))
    with left, right:
        left.connect(right.getsockname())
        left.sendall(bytes(50_000))
    assert network_bytes_sent() - before >= 50_000


def test_leaving_without_close_does_not_abort() -> None:
    command = [sys.executable, str(Path(__file__).with_name("leave_without_close.py"))]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for _ in range(3):
        ended = subprocess.run(command, env=environment, timeout=20, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (1, "pushing\n"), ended.stderr
        assert "left in anger" in ended.stderr


async def test_notices_before_listen_wait(ends: Ends) -> None:
    source = ends.make("prefill-0")
    blocks = np.zeros((4, 4096), dtype=np.uint8)
    late = NixlTransport(WorkerRef("decode-0", "late"), IDENTITY, MemoryPool((blocks.ctypes.data,), 4, 4096))
    await source.transport.connect(late.describe())
    await source.transport.push(late.describe().ref, [0], [0], b"early")
    await until(lambda: len(late._inbox) == 1)
    heard: list[bytes] = []
    late.listen(lambda _, notice: heard.append(notice), lambda _: None)
    await until(lambda: heard == [b"early"])
    with pytest.raises(InvariantBroken):
        late.listen(lambda *_: None, lambda _: None)
    await late.close()


@pytest.mark.parametrize("act", ["push", "notify", "close"])
async def test_whatever_a_peer_does_ends_a_threads_rest(ends: Ends, act: str) -> None:
    periods = PollingPeriods(linger_s=1e-3, idle_s=60.0)
    source, target = (ends.make(name, periods=periods) for name in ("prefill-0", "decode-0"))
    await connect(source, target)
    await connect(target, source)
    await asyncio.sleep(20e-3)  # both rest
    match act:
        case "push":
            await source.transport.push(target.ref, [0], [0], b"")
        case "notify":
            await source.transport.notify(target.ref, b"")
        case "close":
            await source.transport.close()
    await until(lambda: bool(target.lost if act == "close" else target.notices))


@pytest.mark.parametrize("heard", [True, False])
async def test_what_no_ring_announces_is_found_later_and_said(
    ends: Ends, heard: bool, caplog: pytest.LogCaptureFixture
) -> None:
    periods = PollingPeriods(linger_s=1e-3, idle_s=2e-3)
    source, target = (ends.make(name, periods=periods) for name in ("prefill-0", "decode-0"))
    nobody = replace(envelope(target), bell=("127.0.0.1", 9)).encode()
    await connect(source, target, **({} if heard else {"agent_metadata": nobody}))
    for sent in range(1, 9):
        await asyncio.sleep(10e-3)  # the target's thread rests
        await source.transport.push(target.ref, [0], [0], b"pushed")
        await until(partial(lambda sent: len(target.notices) == sent, sent))
    assert ("do not arrive" in caplog.text) is not heard


async def test_a_failing_thread_fails_everything_that_waits(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = await ends.pair()
    engine = source.transport._thread.engine  # type: ignore[attr-defined]
    monkeypatch.setattr(engine, "poll", lambda: 1 // 0)
    outcomes = await asyncio.gather(
        *(source.transport.push(target.ref, [0], [0], b"") for _ in range(3)), return_exceptions=True
    )
    assert {type(outcome) for outcome in outcomes} <= {InvariantBroken, type(None)}
    await until(lambda: "the kv-transfer thread failed" in caplog.text)
    for call in (source.transport.push(target.ref, [0], [0], b""), source.transport.drop(target.ref)):
        with pytest.raises(InvariantBroken, match="ZeroDivisionError"):
            await call
    await source.transport.close()


async def test_a_pool_of_device_memory_needs_scratch_there() -> None:
    with pytest.raises(InvariantBroken):
        NixlTransport(WorkerRef("a", "b"), IDENTITY, MemoryPool((1 << 20,), 1, 4096, memory_kind="VRAM"))
