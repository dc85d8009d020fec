"""Sends one listener's events to one client, over SSE (WHATWG HTML, section 9.2) or a WebSocket (RFC 6455).

Ends when the client goes away, when the hub closes, or when the listener was cut off because the client reads too
slowly: it is then disconnected, whether it takes the last message or not. Does not know which events there are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from freetoken.core.errors import TooManyStreams
from freetoken.daemon.events import Hub, Query
from freetoken.daemon.listener import UNNUMBERED, Event, Listener

LAST_S = 5.0  # for the last message to a client that may not read
GOING_AWAY = 1001  # the daemon ends
TOO_SLOW = 4408
TOO_MANY = 4429

_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class SseReply(Response):
    """The listener as text/event-stream; closes it. `id` is what Last-Event-ID brings back; silence gives comments."""

    media_type = "text/event-stream"

    def __init__(self, listener: Listener) -> None:
        super().__init__(b"", headers=_HEADERS)
        del self.headers["content-length"]
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _until_over(self._listener, self._deliver(send), _departure(receive))
            await _at_last(send({"type": "http.response.body", "body": b""}))
        finally:
            self._listener.close()

    async def _deliver(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": b"retry: 1000\n\n", "more_body": True})
        while not self._listener.ended:
            events = await self._listener.take()
            body = b"".join(map(_record, events)) or b": heartbeat\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def over_websocket(websocket: WebSocket, hub: Hub, query: Query) -> None:
    """Accepts the connection and sends each event as a text message; what the client says is not listened to.

    Closes with GOING_AWAY, TOO_SLOW or TOO_MANY.
    """
    await websocket.accept()
    try:
        listener = hub.listen(query)
    except TooManyStreams as error:
        await websocket.close(TOO_MANY, error.code)
        return
    try:
        await _until_over(listener, _deliver(websocket, hub, listener), _hang_up(websocket))
        if listener.cut.is_set():
            await _at_last(websocket.close(TOO_SLOW, "too slow: resume with ?after="))
        elif listener.ended:
            await _at_last(websocket.close(GOING_AWAY, "the daemon ends"))
    finally:
        listener.close()


async def _deliver(websocket: WebSocket, hub: Hub, listener: Listener) -> None:
    while not listener.ended:
        events = await listener.take()
        for event in events or [hub.heartbeat()]:
            await websocket.send_text(event.json.decode())


async def _until_over(listener: Listener, *work: Coroutine[Any, Any, None]) -> None:
    """Runs until the first of `work` is over or the listener is cut off; then all of it ends."""
    tasks = [asyncio.create_task(coroutine) for coroutine in (*work, _cut(listener))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, WebSocketDisconnect):
            raise error


async def _cut(listener: Listener) -> None:
    await listener.cut.wait()


async def _at_last(sending: Awaitable[None]) -> None:
    """Sends what may not be taken any more: the client is gone, or too slow even for this."""
    with contextlib.suppress(TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
        await asyncio.wait_for(sending, LAST_S)


async def _departure(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _hang_up(websocket: WebSocket) -> None:
    while (await websocket.receive())["type"] != "websocket.disconnect":
        pass


def _record(event: Event) -> bytes:
    number = b"" if event.type in UNNUMBERED else b"id: " + event.id.encode() + b"\n"
    return number + b"data: " + event.json + b"\n\n"
