"""What every handler is given, and how it answers.

Does not know routes, nor who may call (the guard has let the request through).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from freetoken.core.errors import FreeTokenError
from freetoken.daemon.errors import MEDIA_TYPE, problem
from freetoken.daemon.events import Hub
from freetoken.daemon.logbook import LogBook
from freetoken.daemon.operations import Operations
from freetoken.daemon.shelf import Shelf
from freetoken.daemon.state import Identity, Operation
from freetoken.daemon.supervisor.actor import Supervisor

LONGEST_WAIT_S = 60.0  # of Prefer: wait; no call blocks for minutes

_WAIT = re.compile(r"(?:^|[,;\s])wait=([0-9]{1,6})(?:$|[,;\s])")


@dataclass(frozen=True, slots=True)
class Context:
    """The daemon's parts, made once."""

    identity: Identity
    hub: Hub
    operations: Operations
    supervisor: Supervisor
    shelf: Shelf
    lines: LogBook
    features: tuple[str, ...]  # what GET /meta says can be done here
    stop: Callable[[], None]  # asks the whole daemon to end; returns at once


def context(request: HTTPConnection) -> Context:
    found: Context = request.app.state.context
    return found


def reply(value: Any, status: int = 200) -> Response:
    """`value` (dataclasses and enums too) as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def accepted(request: Request, operation: Operation) -> Response:
    """202 and the operation; with `Prefer: wait=N` as soon as it is done, or as it is after N seconds."""
    latest = await context(request).operations.wait(operation.id, wait_s(request))
    response = reply(latest, 202)
    response.headers["location"] = f"/api/v1/operations/{operation.id}"
    return response


def refused(request: Request, error: FreeTokenError) -> Response:
    """`error` as problem+json."""
    request_id = getattr(request.state, "request_id", None)
    body = problem(error, instance=request.url.path, request_id=request_id)
    response = Response(msgspec.json.encode(body), error.http_status, media_type=MEDIA_TYPE)
    if error.retry_after_s is not None:
        response.headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return response


def wait_s(request: Request) -> float:
    """The N of `Prefer: wait=N` (RFC 7240), bounded; 0 without."""
    match = _WAIT.search(request.headers.get("prefer", ""))
    return min(float(match[1]), LONGEST_WAIT_S) if match else 0.0
