"""What the fleet is told, and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass

from core.membership import Role, WorkerRef


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """The worker's process is up, its weights loaded, its server listening."""

    ref: WorkerRef


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The worker said that it cannot start, or did not in time."""

    ref: WorkerRef
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """The worker's process is gone, or hung."""

    ref: WorkerRef
    reason: str


@dataclass(frozen=True, slots=True)
class Wake:
    """A time asked for by WakeAt has come; also the first event of all."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Let all workers end, replace none."""


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start this life of a worker."""

    ref: WorkerRef
    role: Role


@dataclass(frozen=True, slots=True)
class EndWorker:
    """Let the worker finish what it has, then end it; its end comes back as WorkerDied."""

    ref: WorkerRef


@dataclass(frozen=True, slots=True)
class SwitchRole:
    """Let the worker drain and then serve as `to`. Tell `Fleet.drained` how that went, then send Wake."""

    ref: WorkerRef
    to: Role


@dataclass(frozen=True, slots=True)
class ForgetWorker:
    """Make sure that this life is over: kill what is left of it."""

    ref: WorkerRef
    reason: str


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send Wake at this time."""

    at_s: float


Event = WorkerStarted | StartFailed | WorkerDied | Wake | StopAsked
Effect = StartWorker | EndWorker | SwitchRole | ForgetWorker | WakeAt
