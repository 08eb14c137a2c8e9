"""What a worker serves as, and how that ends or changes while its process goes on (docs/adr/0023-role-switch.md).

Weights, KV pool, cached blocks, hand-off sessions, transport and incarnation stay; what serves the role is all that is
replaced. Without clock or socket.
1. Drain: every router hears it, sends nothing new, takes back what has not begun and later the rest (router/drain.py).
2. Nothing is open: no request and no hand-off, in either direction, so no page in quarantine.
3. The other role's service takes its place, and the routers hear what the worker serves as. A worker that is not idle
   in time goes on as it was.
What a router sent before it heard is refused, and planned again there.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from core.membership import Role
from core.messages import Answer, Draining, Serving
from engine.scheduler import Scheduler


class RoleService(Sized, Protocol):
    """Its length: requests that the scheduler does not hold."""

    def unbegun(self) -> list[str]:
        """Requests of which nothing is computed."""
        ...


Service = TypeVar("Service", bound=RoleService)


@dataclass(slots=True)
class Drain:
    """to: the role to serve as afterwards; None: nothing new is taken any more. outcome: None while it is under way,
    empty when nothing was left, else why it did not do what it should."""

    deadline_s: float
    move_at_s: float
    to: Role | None
    outcome: str | None = None


class WorkerRole(Generic[Service]):
    """One worker's. make: the service of a role. send: to all routers."""

    def __init__(
        self,
        role: Role,
        make: Callable[[Role], Service],
        send: Callable[[Answer], None],
        scheduler: Scheduler,
        handoffs: Sized,
    ) -> None:
        self.role = role
        self.service = make(role)
        self._make = make
        self._send = send
        self._scheduler = scheduler
        self._handoffs = handoffs
        self._drain: Drain | None = None

    @property
    def draining(self) -> bool:
        return self._drain is not None

    def state(self, now: float) -> Draining | Serving:
        """What a router must know first."""
        if self._drain is None:
            return Serving(self.role)
        return Draining(max(0.0, self._drain.move_at_s - now), tuple(self.service.unbegun()))

    def held(self) -> dict[str, int]:
        """What is open, by name; nothing when the worker is idle."""
        load = self._scheduler.load()
        counts = {
            "running": load.running_requests,
            "waiting": load.waiting_requests,
            "open": len(self.service),
            "hand-offs": len(self._handoffs),
        }
        return {name: count for name, count in counts.items() if count}

    def drain(self, timeout_s: float, finish_s: float, now: float, to: Role | None = None) -> Drain:
        """Take nothing new; routers move what still runs after `finish_s`. Over when nothing is open, or after
        `timeout_s`: call `poll` until then. A switch is refused while a drain is under way; one for good takes over."""
        drain, current = Drain(now + timeout_s, now + finish_s, to), self._drain
        if current is not None and current.outcome is None:
            if to is not None:
                drain.outcome = "a drain is under way"
                return drain
            if current.to is None:
                return current
            current.outcome = "it is being drained for good"
        self._drain = drain
        self._send(self.state(now))
        return drain

    def poll(self, now: float) -> None:
        """Let a drain end when it can, or must."""
        drain, held = self._drain, self.held()
        if drain is None or drain.outcome is not None or (held and now < drain.deadline_s):
            return
        counts = ", ".join(f"{count} {name}" for name, count in held.items())
        drain.outcome = counts and f"not idle in time: {counts}"
        if drain.to is None:
            return
        if not held and drain.to is not self.role:
            self.role, self.service = drain.to, self._make(drain.to)
        self._drain = None
        self._send(self.state(now))
