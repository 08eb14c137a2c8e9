"""Who is blamed for a worker's death, by what the worker said before."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from core.messages import StartGeneration, StepOutput
from core.request import Placement, StopConditions
from router.admission.policy import AdmissionPolicy, QueuePolicy
from router.config import DispatcherConfig
from router.effects import Effect
from router.flow import Flow
from tests.router.test_dispatcher import IDLE, Cluster, commands, delta, request

MOST = DispatcherConfig().max_silent_failures


class Worker(Cluster):
    """One decode worker, `d1`, which dies again and again, and requests that come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatcher.admission.policy = AdmissionPolicy(queue=QueuePolicy(tokens_ahead=10_000))
        self.num_deaths = 0
        self.attempts: dict[str, str] = {}  # by request id
        self._joined()

    @property
    def flows(self) -> dict[str, Flow]:
        return self.dispatcher._open.flows

    def comes(self, name: str, num_tokens: int = 20) -> None:
        stop = StopConditions(max_tokens=100)
        prompt = replace(request(name), prompt_token_ids=tuple(range(num_tokens)), stop=stop)
        self._note(self.dispatcher.submit(prompt, Placement.AUTO, 0.0))

    def tells(self, computing: set[str], in_line: Collection[str] = ()) -> None:
        self.computing = frozenset(self.attempts[name] for name in computing)
        waiting = tuple(self.attempts[name] for name in in_line)
        said = StepOutput((), IDLE, computing=self.computing, in_line=waiting)
        self._note(self.dispatcher.answered(self.refs["d1"], said, 0.0))

    def draws(self, name: str, position: int) -> None:
        drawn = delta(position, 7, attempt=self.attempts[name])
        self.dispatcher.answered(self.refs["d1"], StepOutput((drawn,), IDLE, computing=self.computing), 0.0)

    def dies(self) -> None:
        self.num_deaths += 1
        self._note(self.dispatcher.worker_lost(self.refs["d1"], float(self.num_deaths)))
        self._joined()

    def _joined(self) -> None:
        self._note(self.join("d1", life=str(self.num_deaths), num_blocks=10_000))

    def _note(self, effects: list[Effect]) -> None:
        for command in commands(effects):
            if isinstance(command, StartGeneration):
                self.attempts[command.request.request_id.partition("#")[0]] = command.request.request_id


def test_who_is_overtaken_by_one_that_kills_is_not_blamed() -> None:
    """As where the first in line finds no room, or waits for the disk: what is smaller goes before it."""
    worker = Worker()
    for name, num_tokens in (("waits", 2000), ("waits too", 2000), ("poison", 50)):
        worker.comes(name, num_tokens)
    while "poison" in worker.flows:
        worker.tells({"poison"}, in_line={"waits", "waits too"})
        worker.dies()
    assert worker.num_deaths == MOST
    assert [worker.flows[name].num_failures for name in ("waits", "waits too")] == [0.0, 0.0]
    for _ in range(MOST):  # the control: who was in the step is
        worker.tells({"waits"}, in_line={"waits too"})
        worker.dies()
    assert list(worker.flows) == ["waits too"]


def test_streams_are_blamed_beside_a_prompt_and_prompts_that_were_in_an_earlier_step_are_not() -> None:
    worker = Worker()
    for name in ("stream", "preempted", "computed"):
        worker.comes(name)
    worker.tells({"stream", "preempted"}, in_line={"stream", "preempted", "computed"})
    worker.draws("stream", 0)
    worker.tells({"computed"})
    worker.dies()
    assert {name: flow.num_failures for name, flow in worker.flows.items()} == {
        "stream": 1.0,
        "preempted": 0.0,
        "computed": 1.0,
    }


@pytest.mark.parametrize("alone", [True, False])
def test_one_that_kills_before_it_is_in_line_is_stopped(alone: bool) -> None:
    """As by its grammar. What is computed meanwhile, and what came in the same moment, is not stopped before it."""
    worker = Worker()
    worker.comes("poison")
    if not alone:
        worker.comes("computed")
    while "poison" in worker.flows:
        worker.tells(set() if alone else {"computed"}, in_line=() if alone else {"computed"})
        if not alone:
            worker.draws("computed", worker.num_deaths)
        worker.dies()
        assert worker.num_deaths <= 2 * MOST
    assert worker.num_deaths == (MOST if alone else 2 * MOST)
    assert alone or "computed" in worker.flows


def test_who_comes_in_the_same_moment_as_one_that_kills_outlives_it() -> None:
    worker = Worker()
    for name in ("poison", "bystander"):
        worker.comes(name)
    while "poison" in worker.flows:
        worker.tells({"poison"}, in_line={"poison"})
        worker.dies()
    assert worker.num_deaths == MOST and "bystander" in worker.flows
