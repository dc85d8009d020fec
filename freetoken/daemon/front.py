"""Answers before the application is there: /live and /health at once, everything else as soon as it is imported.

Pure ASGI, so that the daemon listens long before FastAPI is read from disk. Does not know what the application does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from freetoken.core.errors import DaemonError, DeadlineExceeded, FreeTokenError
from freetoken.daemon.errors import MEDIA_TYPE, problem
from freetoken.daemon.guard import OPEN_PATHS, App, Receive, Scope, Send
from freetoken.daemon.state import Identity

START_DEADLINE_S = 60.0  # longest time a request waits for the application: a cold disk, no more

log = logging.getLogger(__name__)


class HasApp(Protocol):
    @property
    def app(self) -> App: ...

    def begin(self) -> None:
        """Called once on the event loop, before the first request comes through."""
        ...


D = TypeVar("D", bound=HasApp)


class Front(Generic[D]):
    """An ASGI application over one that `assemble` makes in a thread."""

    def __init__(self, assemble: Callable[[], D], identity: Identity) -> None:
        self._assemble = assemble
        self._identity = identity
        self._made: asyncio.Task[D] | None = None

    def begin(self) -> None:
        """Start to make the application. Called once, on the event loop."""
        self._made = asyncio.create_task(self._make())

    async def _make(self) -> D:
        made = await asyncio.to_thread(self._assemble)
        made.begin()
        return made

    async def made(self) -> D:
        """What `assemble` gave. Raises DaemonError if it failed, DeadlineExceeded if it is too slow."""
        if self._made is None:
            raise DaemonError("The daemon has not begun.")
        try:
            return await asyncio.wait_for(asyncio.shield(self._made), START_DEADLINE_S)
        except TimeoutError:
            raise DeadlineExceeded(f"The daemon was not ready after {START_DEADLINE_S:g} s.") from None
        except Exception as error:
            log.error("the application could not be made", exc_info=error)
            raise DaemonError(f"The daemon could not start its application ({type(error).__name__}).") from error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if app is not None:
            await app(scope, receive, send)
            return
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in OPEN_PATHS:
            await _answer(send, 200, self._identity.live(), "application/json")
            return
        try:
            made = await self.made()
        except FreeTokenError as error:
            if scope["type"] == "http":
                await _answer(send, error.http_status, problem(error, instance=scope["path"]), MEDIA_TYPE)
            else:
                await send({"type": "websocket.close", "code": 1013})
            return
        await made.app(scope, receive, send)

    @property
    def _app(self) -> App | None:
        """The application where it is there: the way of every request but the first few."""
        ready = self._made is not None and self._made.done() and self._made.exception() is None
        return self._made.result().app if ready and self._made is not None else None


async def _answer(send: Send, status: int, value: object, media_type: str) -> None:
    body = msgspec.json.encode(value)
    headers = [(b"content-type", media_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
