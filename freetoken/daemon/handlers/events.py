"""GET /events (server-sent events), /events/ws and /logs/ws (WebSocket): the event stream, three doors to it.

`after` (SSE: Last-Event-ID too) is the id `epoch:seq` of the last event seen; `types` takes prefixes of event types and
`subjects` whole subjects, each separated by commas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from fastapi import Query as FromUrl
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from freetoken.daemon.events import Query
from freetoken.daemon.handlers.context import Context, context
from freetoken.daemon.handlers.delivery import SseReply, over_websocket
from freetoken.daemon.listener import Event, Wanted
from freetoken.daemon.logbook import LEVELS, Level

LINES = 200  # of the log in the snapshot of /logs/ws

After = Annotated[str | None, FromUrl(max_length=100)]
Names = Annotated[str, FromUrl(max_length=4000)]


async def stream(request: Request, after: After = None, types: Names = "", subjects: Names = "") -> Response:
    """The stream as server-sent events: hello, snapshot or what was missed, then live."""
    last = request.headers.get("last-event-id") or after
    return SseReply(context(request).hub.listen(_query(last, types, subjects)))


async def socket(websocket: WebSocket, after: After = None, types: Names = "", subjects: Names = "") -> None:
    """The same envelopes, one to a text message."""
    await over_websocket(websocket, context(websocket).hub, _query(after, types, subjects))


async def log_socket(
    websocket: WebSocket, after: After = None, source: str | None = None, level: Level = "debug"
) -> None:
    """Log lines alone; the snapshot is the newest of them."""
    here = context(websocket)
    query = Query(after, _lines_of(source, level), _newest_lines(here, source, level))
    await over_websocket(websocket, here.hub, query)


def _query(after: str | None, types: str, subjects: str) -> Query:
    return Query(after, Wanted(tuple(_names(types)), frozenset(_names(subjects))))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _lines_of(source: str | None, level: Level) -> Callable[[Event], bool]:
    least = LEVELS.index(level)

    def wants(event: Event) -> bool:
        if event.type == "log.line":
            return source in (None, event.source) and LEVELS.index(event.data["level"]) >= least
        return event.type == "log.dropped" or event.type.startswith("stream.")

    return wants


def _newest_lines(here: Context, source: str | None, level: Level) -> Callable[[], Mapping[str, Any]]:
    def snapshot() -> Mapping[str, Any]:
        lines = here.lines.page(source=source, level=level, after=None, limit=LINES)
        return {"lines": msgspec.to_builtins(lines)}

    return snapshot
