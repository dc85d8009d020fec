"""THE table of the control API: method, path, scope, handler.

A route exists when it has a row here; who may call it is its scope, enforced before routing by guard.py (a test holds
the two together). /v1 has its own table, in api/routes.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from starlette.responses import Response

from freetoken.daemon.handlers import daemon, engine, events, live, logs, meta, operations, plans, problems

BASE = "/api/v1"
SOCKET = "WS"  # a WebSocket; its handler answers nothing


class Scope(StrEnum):
    OPEN = "open"  # Host and Origin are checked, nothing else
    TOKEN = "token"


@dataclass(frozen=True, slots=True)
class Route:
    method: str  # of HTTP, or SOCKET
    path: str
    scope: Scope
    handler: Callable[..., Awaitable[Response | None]]

    @property
    def feature(self) -> str:
        """Its name in GET /meta: the path, `engine.load`, without what is filled in."""
        names = self.path.removeprefix(BASE).strip("/").split("/")
        return ".".join(name for name in names if not name.startswith("{"))


ROUTES: tuple[Route, ...] = (
    Route("GET", "/live", Scope.OPEN, live.live),
    Route("GET", "/health", Scope.OPEN, live.live),
    Route("GET", f"{BASE}/live", Scope.OPEN, live.live),
    Route("GET", f"{BASE}/ready", Scope.TOKEN, meta.ready),
    Route("GET", f"{BASE}/meta", Scope.TOKEN, meta.show),
    Route("GET", f"{BASE}/problems", Scope.TOKEN, problems.index),
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
    Route(SOCKET, f"{BASE}/events/ws", Scope.TOKEN, events.socket),
    Route("GET", f"{BASE}/logs", Scope.TOKEN, logs.page),
    Route(SOCKET, f"{BASE}/logs/ws", Scope.TOKEN, events.log_socket),
)
