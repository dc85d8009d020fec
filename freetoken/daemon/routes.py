"""THE table of the control API: method, path, scope, handler.

A route exists when it has a row here; who may call it is its scope, enforced before routing by guard.py (a test holds
the two together). /v1 has its own table, in api/routes.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from starlette.responses import Response

from freetoken.daemon.handlers import daemon, engine, events, live, operations, plans

BASE = "/api/v1"


class Scope(StrEnum):
    OPEN = "open"  # Host and Origin are checked, nothing else
    TOKEN = "token"


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    scope: Scope
    handler: Callable[..., Awaitable[Response]]


ROUTES: tuple[Route, ...] = (
    Route("GET", "/live", Scope.OPEN, live.live),
    Route("GET", "/health", Scope.OPEN, live.live),
    Route("GET", f"{BASE}/live", Scope.OPEN, live.live),
    Route("GET", f"{BASE}/daemon", Scope.TOKEN, daemon.show),
    Route("POST", f"{BASE}/daemon/shutdown", Scope.TOKEN, daemon.shutdown),
    Route("GET", f"{BASE}/engine", Scope.TOKEN, engine.show),
    Route("POST", f"{BASE}/engine/load", Scope.TOKEN, engine.load),
    Route("POST", f"{BASE}/engine/unload", Scope.TOKEN, engine.unload),
    Route("POST", f"{BASE}/plans", Scope.TOKEN, plans.create),
    Route("GET", f"{BASE}/operations", Scope.TOKEN, operations.index),
    Route("GET", f"{BASE}/operations/{{id}}", Scope.TOKEN, operations.show),
    Route("POST", f"{BASE}/operations/{{id}}/cancel", Scope.TOKEN, operations.cancel),
    Route("GET", f"{BASE}/events", Scope.TOKEN, events.stream),
)
