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
