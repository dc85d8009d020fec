"""The data of each event type, for the contract that is written from it. Pure.

A type that is not here may still come (additions are no new version); clients skip what they do not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from freetoken.daemon.contract import shapes
from freetoken.daemon.contract.shapes import Json
from freetoken.daemon.logbook import Line
from freetoken.daemon.state import EngineState, Identity, Operation


class Hello(msgspec.Struct):
    """The first of every stream. `ring`: events of each class that can be resumed over."""

    heartbeat_ms: int
    ring: int


class Snapshot(msgspec.Struct):
    """Everything as it is now."""

    daemon: Identity
    engine: shapes.Engine
    operations: list[Operation]
    downloads: list[Json]
    gpus: list[Json]


class LogSnapshot(msgspec.Struct):
    """Of /logs/ws: the newest lines."""

    lines: list[Line]


class Gap(msgspec.Struct):
    """Something that came after `after` is no longer known.

    With `snapshot` one follows. Without, every event that makes up the state follows, and only log lines or events of
    requests are missing.
    """

    after: str
    snapshot: bool


class Heartbeat(msgspec.Struct):
    """Nothing happened, on a WebSocket; comments say the same on SSE."""


class LoadPhase(msgspec.Struct):
    """`total` is null where it is not known."""

    phase: str
    done: int
    total: int | None
    unit: str


class LoadCompleted(msgspec.Struct):
    measured: Json


class Crashed(msgspec.Struct):
    exit: int | None
    signal: str | None
    oom_killed: bool
    last_lines: list[str]
    attempt: int | None
    backoff_ms: int | None
    error: shapes.Problem


class ComparedLine(msgspec.Struct):
    line: str
    predicted_bytes: int
    measured_bytes: int


class Compared(msgspec.Struct):
    """The plan beside what a finished load took."""

    lines: list[ComparedLine]
    total_predicted_bytes: int
    total_measured_bytes: int | None


class RestartScheduled(msgspec.Struct):
    attempt: int
    backoff_ms: int
    at: str


class GivenUp(msgspec.Struct):
    """It is not started again by itself."""

    why: Literal["deterministic", "repeated", "gpu_lost", "too_many"]
    attempts: int
    error: shapes.Problem


class Unresponsive(msgspec.Struct):
    """It lives and does not answer; it is ended."""

    reason: Literal["silent", "step"]
    silent_s: float
    step: int
    step_age_ms: int


class Cleared(msgspec.Struct):
    id: str


class LogDropped(msgspec.Struct):
    """So many lines were not told, because they came too fast; the newest can be read at /logs."""

    source: str
    count: int


EVENTS: Mapping[str, tuple[Any, ...]] = {  # several: any of them
    "stream.hello": (Hello,),
    "stream.snapshot": (Snapshot, LogSnapshot),
    "stream.gap": (Gap,),
    "stream.heartbeat": (Heartbeat,),
    "engine.state_changed": (EngineState,),
    "engine.crashed": (Crashed,),
    "engine.restart_scheduled": (RestartScheduled,),
    "engine.given_up": (GivenUp,),
    "engine.unresponsive": (Unresponsive,),
    "load.phase": (LoadPhase,),
    "load.progress": (LoadPhase,),
    "load.completed": (LoadCompleted,),
    "load.failed": (shapes.Problem,),
    "plan.created": (shapes.Plan,),
    "plan.compared": (Compared,),
    "diagnosis.raised": (shapes.Diagnosis,),
    "diagnosis.updated": (shapes.Diagnosis,),
    "diagnosis.cleared": (Cleared,),
    "operation.updated": (Operation,),
    "log.line": (Line,),
    "log.dropped": (LogDropped,),
}
