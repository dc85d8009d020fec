"""GET /operations, /operations/{id} and POST /operations/{id}/cancel."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from freetoken.daemon.handlers.context import accepted, context, reply, wait_s


async def index(request: Request) -> Response:
    """The newest operations, oldest first."""
    return reply({"operations": context(request).operations.recent(100)})


async def show(request: Request, id: str) -> Response:
    """One operation, now or as soon as it is done."""
    return reply(await context(request).operations.wait(id, wait_s(request)))


async def cancel(request: Request, id: str) -> Response:
    """Asks it to end; 202 and the operation, which may already be over."""
    return await accepted(request, context(request).operations.cancel(id))
