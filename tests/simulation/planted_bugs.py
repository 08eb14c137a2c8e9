"""Bugs that walks and soaks must find, each what some system of this kind has shipped. `patch`: as `setattr`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from core.membership import WorkerRef
from kv_transfer.target import TargetSide

Patch = Callable[[object, str, Any], None]


def free_before_quiet(patch: Patch) -> None:
    """A cancelled target frees its pages while a push may still come."""
    stop = TargetSide._stop

    def stop_and_free(self: TargetSide, session: Any, reason: str, now: float) -> Any:
        effects = stop(self, session, reason, now)
        self._quiet(session)
        return effects

    patch(TargetSide, "_stop", stop_and_free)


def ignore_generation(patch: Patch) -> None:
    """A target that believes any notice which names a hand-off it knows."""
    notice = TargetSide.notice

    def believe(self: TargetSide, sender: WorkerRef, message: Any, now: float) -> Any:
        session = self._open.get(message.handoff_id)
        if session is not None:
            message = type(message)(message.handoff_id, session.ticket.generation, message.body)
            sender = session.source
        return notice(self, sender, message, now)

    patch(TargetSide, "notice", believe)


def forget_the_incarnation(patch: Patch) -> None:
    """The dead are known by the name of their place: whoever lives there next counts as dead."""
    init, peer_dead = TargetSide.__init__, TargetSide.peer_dead

    class Places(deque[WorkerRef]):
        def __contains__(self, ref: object) -> bool:
            return any(isinstance(ref, WorkerRef) and dead.worker_id == ref.worker_id for dead in self)

    def start(self: TargetSide, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self._dead = Places()

    def all_dead(self: TargetSide, peer: WorkerRef, now: float) -> Any:
        effects = peer_dead(self, peer, now)
        for source in {session.source for session in self._open.values()}:
            if source.worker_id == peer.worker_id and source != peer:
                effects += peer_dead(self, source, now)
        return effects

    patch(TargetSide, "__init__", start)
    patch(TargetSide, "peer_dead", all_dead)


PLANTS: dict[str, Callable[[Patch], None]] = {
    "free-before-drain": free_before_quiet,
    "skip-the-fence": ignore_generation,
    "forget-the-incarnation": forget_the_incarnation,
}
