"""GET /events: the event stream as server-sent events (WHATWG HTML, section 9.2).

One record an event, its data the whole envelope; `id` is what Last-Event-ID (or ?after=) brings back. ?types= takes
prefixes of event types, separated by commas.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from freetoken.daemon.events import Event, Hub
from freetoken.daemon.handlers.context import context

_UNNUMBERED = frozenset({"stream.hello", "stream.gap"})  # to resume from these would miss the snapshot that follows
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


async def stream(request: Request, after: str | None = None, types: str = "") -> Response:
    last = request.headers.get("last-event-id") or after
    wanted = [prefix.strip() for prefix in types.split(",") if prefix.strip()]
    records = _records(context(request).hub, last, wanted)
    return StreamingResponse(records, media_type="text/event-stream", headers=_HEADERS)


async def _records(hub: Hub, after: str | None, types: list[str]) -> AsyncIterator[bytes]:
    yield b"retry: 1000\n\n"
    async with aclosing(hub.listen(after, types)) as events:
        async for event in events:
            yield _record(event) if event is not None else b": heartbeat\n\n"


def _record(event: Event) -> bytes:
    number = b"" if event.type in _UNNUMBERED else b"id: " + event.id.encode() + b"\n"
    return number + b"data: " + msgspec.json.encode(event) + b"\n\n"
