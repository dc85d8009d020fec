"""What the daemon shows of itself: frozen values, exactly as the app sees them. Pure.

Does not know how they come about (supervisor/) nor how they travel (handlers/, events.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

API_VERSION = "1"
SERVICE = "freetoken"


class EngineStatus(StrEnum):
    """Where the engine is in its life; legal moves are in supervisor/states.py."""

    STOPPED = "stopped"
    STARTING = "starting"  # a load was asked for: files, plan, process
    LOADING = "loading"  # the process builds the model
    WARMING = "warming"  # the model is there and runs for the first time
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    FAILED = "failed"


class OperationState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"  # the daemon ended while it ran

    @property
    def done(self) -> bool:
        return self not in (OperationState.QUEUED, OperationState.RUNNING)


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` units; total 0 where it is not known."""

    done: int
    total: int
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """This daemon, from its start to its end."""

    instance_id: str
    version: str
    url: str
    pid: int
    start_time: float  # unix seconds, as the OS gives it
    api_version: str = API_VERSION

    def live(self) -> dict[str, str]:
        """What anybody on this machine may know: enough to ask "is it ours, and this one?"."""
        return {"service": SERVICE, "api_version": self.api_version, "instance_id": self.instance_id}


@dataclass(frozen=True, slots=True)
class EngineState:
    """The engine and the model in it."""

    state: EngineStatus = EngineStatus.STOPPED
    since: str = ""  # RFC 3339
    model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    operation: str | None = None  # id of the load or unload that runs
    pid: int | None = None
    failure: Mapping[str, Any] | None = None  # problem+json of why the last engine or load ended


@dataclass(frozen=True, slots=True)
class Operation:
    """A piece of work that outlives the call that asked for it."""

    id: str
    kind: str
    subject: str | None
    state: OperationState
    created: str  # RFC 3339
    updated: str
    phase: str | None = None
    progress: Progress | None = None
    eta_ms: int | None = None
    stalled_ms: int | None = None
    error: Mapping[str, Any] | None = None  # problem+json


def utc(unix_s: float) -> str:
    """RFC 3339 with milliseconds."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
