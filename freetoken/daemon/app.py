"""Puts the daemon's parts together and makes the FastAPI application of its two tables.

Imported in a thread while the daemon already answers (front.py): it brings half a second of libraries. Does not know
sockets or processes' arguments (main.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from freetoken.api.routes import v1_router
from freetoken.core.errors import FreeTokenError, MalformedBody, MethodNotAllowed, RouteNotFound
from freetoken.daemon.errors import unexpected
from freetoken.daemon.events import Hub
from freetoken.daemon.handlers.context import Context, refused
from freetoken.daemon.idempotency import Once
from freetoken.daemon.logbook import LogBook
from freetoken.daemon.operations import Operations
from freetoken.daemon.residuals import Residuals
from freetoken.daemon.routes import ROUTES, SOCKET
from freetoken.daemon.shelf import Shelf
from freetoken.daemon.state import Identity
from freetoken.daemon.store import Home
from freetoken.daemon.supervisor.actor import Desk, Supervisor
from freetoken.daemon.supervisor.host import Host
from freetoken.daemon.supervisor.prepare import parts
from freetoken.daemon.supervisor.view import engine_view
from freetoken.settings.schema import Settings

FEATURES = tuple(sorted({"idempotency-key", "prefer-wait", *(route.feature for route in ROUTES)}))


@dataclass(frozen=True, slots=True)
class Start:
    """What main.py knows when the daemon begins."""

    home: Home
    settings: Settings
    identity: Identity
    worker: tuple[str, ...]  # the engine program
    redact: Callable[[str], str]  # for log lines
    stop: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Daemon:
    """The application, and the parts that have an end."""

    app: FastAPI
    context: Context

    def begin(self) -> None:
        """Takes over an engine that an earlier daemon left, or loads the model of the start."""
        self.context.supervisor.begin()

    async def close(self) -> None:
        """Ends the engine. The event streams end first, so that nobody waits for them."""
        self.context.hub.close()
        await self.context.supervisor.close()


def assemble(start: Start) -> Daemon:
    """Everything, once. Starts nothing."""
    hub = Hub(start.identity.instance_id, lambda: snapshot(here))
    operations = Operations(start.home.operations, hub)
    shelf = Shelf(start.home.models)
    lines = LogBook(hub, start.redact)
    for source in ("daemon", "engine"):
        lines.remember(source, start.home.logs / f"{source}.log")
    made_of = parts(start.worker, Residuals(start.home.residuals))
    supervisor = Supervisor(start.home, start.settings, Desk(hub, operations, shelf), made_of)
    here = Context(start.identity, hub, operations, supervisor, shelf, lines, FEATURES, start.stop)
    host = Host(supervisor, shelf, operations, start.settings)
    return Daemon(build_app(here, host), here)


def snapshot(here: Context) -> dict[str, Any]:
    """The data of stream.snapshot; nothing is downloaded by the daemon and no GPU is used, which is said by []."""
    return {
        "daemon": msgspec.to_builtins(here.identity),
        "engine": engine_view(here.supervisor),
        "operations": msgspec.to_builtins(here.operations.recent()),
        "downloads": [],
        "gpus": [],
    }


def build_app(here: Context, host: Host) -> FastAPI:
    """The two tables and the shape of errors. No generated pages: they load scripts from elsewhere."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.context = here
    for route in ROUTES:
        if route.method == SOCKET:
            app.add_api_websocket_route(route.path, route.handler)
        else:
            app.add_api_route(route.path, route.handler, methods=[route.method], response_model=None)
    app.add_middleware(Once)
    app.include_router(v1_router(host))
    app.add_exception_handler(FreeTokenError, _typed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _unrouted)
    app.add_exception_handler(Exception, _unforeseen)
    return app


async def _typed(request: Request, error: Exception) -> Response:
    assert isinstance(error, FreeTokenError)  # noqa: S101 - registered for this class alone
    return refused(request, error)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for this class alone
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "json_invalid":
        detail = f"The body is not JSON: {first['ctx']['error']} at character {place or '?'}."
    else:
        detail = f"{place or 'The body'}: {first['msg']}."
    return refused(request, MalformedBody(detail, param=place or None))


async def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for this class alone
    asked = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return refused(request, RouteNotFound(f"{asked} does not exist."))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        response = refused(request, MethodNotAllowed(f"{asked} is not allowed; this path takes {allowed}."))
        response.headers["allow"] = allowed
        return response
    return refused(request, MalformedBody(f"{asked}: {error.detail}"))


async def _unforeseen(request: Request, error: Exception) -> Response:
    return refused(request, unexpected(error))  # starlette raises it again afterwards, which puts it into the log
