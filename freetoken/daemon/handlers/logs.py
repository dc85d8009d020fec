"""GET /logs: a page of log lines."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from freetoken.daemon.handlers.context import context, reply
from freetoken.daemon.logbook import PAGE, Level

Seq = Annotated[int | None, Query(ge=0, le=2**53)]
Limit = Annotated[int, Query(ge=1, le=PAGE)]


async def page(
    request: Request, source: str | None = None, level: Level = "debug", after: Seq = None, limit: Limit = 200
) -> Response:
    """The newest lines, or with `after` the next ones after that number; oldest first."""
    book = context(request).lines
    lines = book.page(source=source, level=level, after=after, limit=limit)
    return reply({"lines": lines, "newest": book.newest})
