"""GET /daemon and POST /daemon/shutdown."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from freetoken.daemon.handlers.context import context, reply


class ShutdownBody(BaseModel):
    """The engine ends with its daemon: no daemon takes over an engine that it did not start."""

    model_config = ConfigDict(extra="forbid")
    engine: Literal["stop"] = "stop"


async def show(request: Request) -> Response:
    """Which daemon this is: version, url, pid, start time."""
    return reply(context(request).identity)


async def shutdown(request: Request, body: ShutdownBody | None = None) -> Response:
    """202 at once; the daemon is gone when its process is, which its pid tells."""
    here = context(request)
    response = reply({"stopping": True, "pid": here.identity.pid}, 202)
    response.background = BackgroundTask(here.stop)
    return response
