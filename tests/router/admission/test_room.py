"""How much may be out at the workers: what other routers have sent counts too."""

from __future__ import annotations

import pytest

from core.membership import GivenWork, Role, WorkerLoad, WorkerRef
from router.admission.room import Capacity, PromptsOut
from router.view import ClusterView
from tests.worker_info import worker_info


@pytest.mark.parametrize(
    ("own_tokens", "others_tokens", "has_room"),
    [(100, 0, True), (199, 0, True), (200, 0, False), (100, 99, True), (100, 100, False), (0, 500, False)],
)
def test_prompts_of_all_routers_fill_the_workers(own_tokens: int, others_tokens: int, has_room: bool) -> None:
    view = ClusterView()
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        view.register(worker_info(WorkerRef(name, "1"), role), now=0.0)
        view.ready(WorkerRef(name, "1"))
    view.heard(WorkerRef("p", "1"), WorkerLoad(), GivenWork(1, others_tokens, others_tokens), now=0.0)
    view.heard(WorkerRef("d", "1"), WorkerLoad(), GivenWork(1, others_tokens, 0), now=0.0)  # the same prompts' blocks
    capacity = Capacity.count(view, now=0.0)
    assert capacity.has_room(PromptsOut(num_prompts=4, num_tokens=own_tokens), tokens_ahead=100) is has_room
    assert capacity.has_room(PromptsOut(num_prompts=3, num_tokens=own_tokens), tokens_ahead=100)  # each has its least


@pytest.mark.parametrize(
    ("own_tokens", "others_tokens", "has_room"),
    [(63, 0, True), (64, 0, False), (32, 31, True), (32, 32, False), (1, 500, False)],
)
def test_kv_that_other_routers_have_spoken_for_is_not_free(own_tokens: int, others_tokens: int, has_room: bool) -> None:
    view, ref = ClusterView(), WorkerRef("d", "1")
    view.register(worker_info(ref, Role.DECODE, block_size=16, num_blocks=10), now=0.0)
    view.ready(ref)
    view.heard(ref, WorkerLoad(free_blocks=4, used_blocks=6), GivenWork(1, others_tokens, 0, others_tokens), now=0.0)
    capacity = Capacity.count(view, now=0.0)
    assert capacity.has_room(PromptsOut(1, 1, unplaced_prompts=1, unplaced_tokens=own_tokens), 100) is has_room
    assert capacity.has_room(PromptsOut(), 100)  # one is sent for the next room, whatever others have sent
