"""Credit for each peer, turns for hand-offs, and the time that a push may take."""

from __future__ import annotations

import random
from collections import Counter

from core.handoff import BlocksPushed, HandoffNotice
from core.membership import WorkerRef
from kv_transfer.credit import AskedPush, PushCredit
from kv_transfer.effects import Push
from kv_transfer.pace import LEAST_BYTES_PER_S, PATIENCE, TransferPace

PEER, OTHER = WorkerRef("decode-0", "a"), WorkerRef("decode-1", "b")


def asked(handoff_id: str, sequence: int, num_blocks: int, peer: WorkerRef = PEER) -> AskedPush:
    blocks = tuple(range(num_blocks))
    notice = HandoffNotice(handoff_id, 1, BlocksPushed(sequence, 0, num_blocks))
    return AskedPush(Push(peer, blocks, blocks, notice), 0.0)


def test_what_fits_starts_and_the_rest_waits_for_its_peer_only() -> None:
    credit = PushCredit(block_bytes=10, max_bytes=100)
    first, second, third = (asked("long", number, 6) for number in range(3))
    assert credit.add(first) == [first]
    assert credit.add(second) == credit.add(third) == []
    elsewhere = asked("other", 0, 6, OTHER)
    assert credit.add(elsewhere) == [elsewhere]
    assert credit.settled(first.push) == [second]
    assert credit.settled(second.push) == [third]


def test_a_push_above_the_credit_goes_alone() -> None:
    credit = PushCredit(block_bytes=10, max_bytes=100)
    small, huge = asked("small", 0, 1), asked("huge", 0, 50)
    assert credit.add(small) == [small]
    assert credit.add(huge) == []
    assert credit.settled(small.push) == [huge]
    assert credit.add(small) == []
    assert credit.settled(huge.push) == [small]


def test_handoffs_take_turns() -> None:
    credit = PushCredit(block_bytes=10, max_bytes=100)
    long = [asked("long", number, 10) for number in range(4)]
    for push in long:
        credit.add(push)
    short = asked("short", 0, 10)
    credit.add(short)
    order, running = ["long0"], long[0]
    while started := credit.settled(running.push):
        [running] = started
        assert isinstance(running.push.notice.body, BlocksPushed)
        order.append(f"{running.handoff_id}{running.push.notice.body.sequence}")
    assert order == ["long0", "long1", "short0", "long2", "long3"]


def test_any_mix_keeps_the_bound_the_order_and_loses_nothing() -> None:
    rng = random.Random(7)
    credit = PushCredit(block_bytes=10, max_bytes=100)
    running: list[AskedPush] = []
    seen: dict[str, list[int]] = {}
    num_asked: Counter[str] = Counter()

    def start(pushes: list[AskedPush]) -> None:
        for item in pushes:
            running.append(item)
            assert isinstance(item.push.notice.body, BlocksPushed)
            seen.setdefault(item.handoff_id, []).append(item.push.notice.body.sequence)
        assert len(running) <= 1 or sum(len(item.push.source_blocks) for item in running) <= 10

    for _ in range(2000):
        if rng.random() < 0.5:
            name = rng.choice("abcd")
            start(credit.add(asked(name, num_asked[name], rng.randrange(15))))
            num_asked[name] += 1
        elif running:
            start(credit.settled(running.pop(rng.randrange(len(running))).push))
    while running:
        start(credit.settled(running.pop().push))
    assert {name: list(range(count)) for name, count in num_asked.items()} == seen
    assert not credit._lanes


def test_the_time_a_push_may_take_follows_what_pushes_took() -> None:
    pace = TransferPace(block_bytes=1_000_000)
    assert pace.bound_s(PEER, 100) == 0.0
    pace.probed(PEER, gbps=1.0)
    assert pace.bound_s(PEER, 100) == PATIENCE * 0.1
    for _ in range(50):
        pace.pushed(PEER, 10, duration_s=1.0)
    assert abs(pace.bound_s(PEER, 100) - PATIENCE * 10.0) < 0.01
    pace.probed(PEER, gbps=1.0)  # a probe when it connects again is less than what was seen
    assert pace.bound_s(PEER, 100) > PATIENCE
    pace.pushed(PEER, 1, duration_s=60.0)  # it was frozen, or we were: not ten minutes for ten blocks from now on
    assert pace.bound_s(PEER, 100) <= PATIENCE * 100 * 1_000_000 / LEAST_BYTES_PER_S
    pace.forget(PEER)
    assert pace.bound_s(PEER, 100) == 0.0
