"""What only the NIXL backend does: metadata checks, the probe's report, an owner thread that never dies silently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from transport_ends import IDENTITY, End, Ends, connect, described, until

from core.errors import InvariantBroken, PeerRefused
from core.membership import WorkerRef
from kv_transfer.nixl import NixlTransport
from kv_transfer.nixl_operation import Settled
from kv_transfer.nixl_probe import LANE_LOOPBACK, LANE_MEMORY, LANE_NETWORK, Envelope, infer_lane
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
    scratch = (whole.scratch_address, whole.scratch_bytes, whole.host)
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
        moved = Envelope(whole.scratch_address + (1 << 30), whole.scratch_bytes, whole.host, whole.metadata)
        await connect(source, target, agent_metadata=moved.encode())
    assert refused.value.field == "agent_metadata"
    await connect(source, target)


async def test_a_pool_outside_what_is_registered_is_refused(ends: Ends) -> None:
    source, target = ends.make("prefill-0"), ends.make("decode-0")
    base_address = described(target).base_address
    for claim in ({"num_blocks": 1 << 20}, {"base_address": base_address + 4096}, {"num_blocks": 0}):
        with pytest.raises(PeerRefused) as refused:
            await connect(source, target, **claim)
        assert refused.value.field == "base_address"
    await connect(source, target)


async def test_the_probe_reports_its_speed(ends: Ends) -> None:
    source, target = ends.make("prefill-0"), ends.make("decode-0")
    link = await source.transport.connect(target.transport.describe())
    assert link.lane in (LANE_MEMORY, LANE_LOOPBACK)
    assert link.probe_gbps > 0.01


@pytest.mark.parametrize(
    ("same_host", "in_post", "gbps", "lane"),
    [
        (True, True, 0.5, LANE_MEMORY),
        (True, False, 20.0, LANE_MEMORY),
        (True, False, 3.0, LANE_LOOPBACK),
        (False, False, 40.0, LANE_NETWORK),
        (False, False, 1.0, LANE_NETWORK),
    ],
)
def test_lane_is_inferred(same_host: bool, in_post: bool, gbps: float, lane: str) -> None:
    assert infer_lane(same_host, Settled(0.001, in_post), gbps) == lane


async def test_notices_before_listen_wait(ends: Ends) -> None:
    source = ends.make("prefill-0")
    blocks = np.zeros((4, 4096), dtype=np.uint8)
    late = NixlTransport(WorkerRef("decode-0", "late"), IDENTITY, MemoryPool(blocks.ctypes.data, 4, 4096))
    await source.transport.connect(late.describe())
    await source.transport.push(late.describe().ref, [0], [0], b"early")
    await until(lambda: late.stats().notices_received == 1)
    heard: list[bytes] = []
    late.listen(lambda _, notice: heard.append(notice), lambda _: None)
    await until(lambda: heard == [b"early"])
    with pytest.raises(InvariantBroken):
        late.listen(lambda *_: None, lambda _: None)
    await late.close()


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
        NixlTransport(WorkerRef("a", "b"), IDENTITY, MemoryPool(1 << 20, 1, 4096, memory_kind="VRAM"))
