"""What each route of the table answers: status to shape, and the headers that it reads. Pure.

A row of daemon/routes.py without one here fails the writing of the contract. Problems are common to all and not named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freetoken.daemon.contract import shapes
from freetoken.daemon.routes import BASE
from freetoken.daemon.state import Identity, Operation

PREFER = "Prefer"
ONCE = "Idempotency-Key"
LAST_EVENT = "Last-Event-ID"

HEADERS: Mapping[str, str] = {
    PREFER: "`wait=N` (RFC 7240): answer as soon as the operation is done, after N seconds at the latest.",
    ONCE: "1 to 255 printable characters; the same key with the same request gives the same operation.",
    LAST_EVENT: "The id of the last event seen, `epoch:seq`; stands above `after`.",
}


class EventStream:
    """Stands for text/event-stream: the records are the events of events.schema.json."""


@dataclass(frozen=True, slots=True)
class Answers:
    by_status: Mapping[int, Any]
    headers: tuple[str, ...] = ()


_WORK = {202: Operation}
_WORK_HEADERS = (PREFER, ONCE)

ANSWERS: Mapping[tuple[str, str], Answers] = {
    ("GET", "/live"): Answers({200: shapes.Live}),
    ("GET", "/health"): Answers({200: shapes.Live}),
    ("GET", f"{BASE}/live"): Answers({200: shapes.Live}),
    ("GET", f"{BASE}/ready"): Answers({200: shapes.Ready, 503: shapes.Ready}),
    ("GET", f"{BASE}/meta"): Answers({200: shapes.Meta}),
    ("GET", f"{BASE}/problems"): Answers({200: shapes.Problems}),
    ("GET", f"{BASE}/daemon"): Answers({200: Identity}),
    ("POST", f"{BASE}/daemon/shutdown"): Answers({202: shapes.Stopping}),
    ("POST", f"{BASE}/plans"): Answers({200: shapes.Plan}),
    ("GET", f"{BASE}/engine"): Answers({200: shapes.Engine}),
    ("POST", f"{BASE}/engine/load"): Answers({200: shapes.Engine, **_WORK}, _WORK_HEADERS),
    ("POST", f"{BASE}/engine/unload"): Answers({200: shapes.Engine, **_WORK}, _WORK_HEADERS),
    ("GET", f"{BASE}/operations"): Answers({200: shapes.Operations}),
    ("GET", f"{BASE}/operations/{{id}}"): Answers({200: Operation}, (PREFER,)),
    ("POST", f"{BASE}/operations/{{id}}/cancel"): Answers(_WORK, (PREFER,)),
    ("GET", f"{BASE}/events"): Answers({200: EventStream}, (LAST_EVENT,)),
    ("GET", f"{BASE}/logs"): Answers({200: shapes.Logs}),
}
