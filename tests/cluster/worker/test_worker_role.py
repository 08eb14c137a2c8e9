"""A worker's role on its own: drained, flipped, put back, and never while something is open."""

from __future__ import annotations

from cluster.worker.role import WorkerRole
from core.membership import Role, WorkerLoad
from core.messages import Answer, Draining, Serving


class Parts:
    """What a role stands on, by hand."""

    def __init__(self, role: Role = Role.DECODE) -> None:
        self.running = 0
        self.handoffs: list[str] = []
        self.said: list[Answer] = []
        self.made: list[Role] = []
        self.role = WorkerRole(role, self.make, self.said.append, self, self.handoffs)  # type: ignore[arg-type, var-annotated]

    def load(self) -> WorkerLoad:
        return WorkerLoad(running_requests=self.running)

    def make(self, role: Role) -> Service:
        self.made.append(role)
        return Service()


class Service(list[str]):
    def unbegun(self) -> list[str]:
        return list(self)


def test_an_idle_worker_flips_at_once() -> None:
    parts = Parts()
    drain = parts.role.drain(10.0, 2.0, now=0.0, to=Role.PREFILL)
    assert parts.role.draining and parts.said == [Draining(2.0)]
    parts.role.poll(0.0)
    assert drain.outcome == "" and parts.role.role is Role.PREFILL and not parts.role.draining
    assert parts.said == [Draining(2.0), Serving(Role.PREFILL)]
    assert parts.made == [Role.DECODE, Role.PREFILL]


def test_nothing_flips_while_anything_is_open() -> None:
    parts = Parts()
    parts.role.service.append("queued")
    drain = parts.role.drain(10.0, 2.0, now=0.0, to=Role.PREFILL)
    assert parts.said == [Draining(2.0, ("queued",))]
    parts.role.poll(1.0)
    parts.role.service.clear()
    parts.running = 1
    parts.role.poll(2.0)
    parts.running = 0
    parts.handoffs.append("pushed, not landed")
    parts.role.poll(3.0)
    assert drain.outcome is None and parts.role.role is Role.DECODE
    parts.handoffs.clear()
    parts.role.poll(4.0)
    assert drain.outcome == "" and parts.role.role is Role.PREFILL


def test_a_worker_that_is_not_idle_in_time_goes_on_as_it_was_and_says_why() -> None:
    parts = Parts()
    parts.handoffs.append("stuck")
    drain = parts.role.drain(10.0, 2.0, now=0.0, to=Role.PREFILL)
    parts.role.poll(10.0)
    assert drain.outcome == "not idle in time: 1 hand-offs"
    assert parts.said[-1] == Serving(Role.DECODE) and not parts.role.draining and parts.made == [Role.DECODE]


def test_a_drained_worker_stays_so_until_it_is_put_back() -> None:
    parts = Parts()
    drain = parts.role.drain(10.0, 2.0, now=0.0)
    parts.role.poll(0.0)
    assert drain.outcome == "" and parts.role.draining
    assert parts.role.state(1.5) == Draining(0.5)  # what a router that comes now hears
    back = parts.role.drain(10.0, 2.0, now=5.0, to=Role.DECODE)
    parts.role.poll(5.0)
    assert back.outcome == "" and not parts.role.draining and parts.said[-1] == Serving(Role.DECODE)


def test_a_second_switch_is_refused_and_an_end_goes_before_a_switch() -> None:
    parts = Parts()
    parts.running = 1
    first = parts.role.drain(10.0, 2.0, now=0.0, to=Role.PREFILL)
    assert parts.role.drain(10.0, 2.0, now=1.0, to=Role.PREFILL).outcome == "a drain is under way"
    assert first.outcome is None
    last = parts.role.drain(10.0, 2.0, now=2.0)
    assert first.outcome == "it is being drained for good"
    assert parts.role.drain(1.0, 2.0, now=2.5) is last
    parts.running = 0
    parts.role.poll(3.0)
    assert last.outcome == "" and parts.role.role is Role.DECODE and parts.role.draining
