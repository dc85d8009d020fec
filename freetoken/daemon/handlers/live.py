"""GET /live and /health: is it ours, and which one? Answers without a token."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from freetoken.daemon.handlers.context import context, reply


async def live(request: Request) -> Response:
    """The service, its API version and the number of this start."""
    return reply(context(request).identity.live())
