"""`Idempotency-Key` on POSTs of the control API: the same key with the same request gives the same operation.

One layer inside the application, so that no route that creates work can forget it. A request that answers 202 with the
Location of an operation is remembered by its key, within this daemon's life; one that fails is not: it may be tried
again. While the first runs, a second one waits for it. Lives in one event loop. Does not know what the work is.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from freetoken.core.errors import (
    DeadlineExceeded,
    FreeTokenError,
    IdempotencyKeyReused,
    MalformedBody,
    OperationNotFound,
)
from freetoken.daemon.handlers.context import LONGEST_WAIT_S, accepted, context, refused
from freetoken.daemon.state import Operation

KEPT = 256  # keys
CONTROL = "/api/v1/"

_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_OPERATION = re.compile(rb"/api/v1/operations/(\w+)")


@dataclass(slots=True)
class _First:
    """The first request with a key, and what came of it."""

    digest: bytes  # of its path and body
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    operation: str | None = None  # id of what it began

    def look(self, message: Message) -> None:
        """At its answer, on the way out."""
        if message["type"] != "http.response.start":
            return
        location = dict(message["headers"]).get(b"location", b"")
        found = _OPERATION.fullmatch(location) if message["status"] == 202 else None
        self.operation = found[1].decode() if found else None
        self.answered.set()


class Once:
    """The layer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._firsts: dict[str, _First] = {}  # by key, oldest first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        creates = scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith(CONTROL)
        key = Request(scope).headers.get("idempotency-key") if creates else None
        if key is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            body = await request.body()
            digest = hashlib.sha256(f"{scope['path']}\n".encode() + body).digest()
            known = await self._known(request, key, digest)
        except ClientDisconnect:
            return
        except FreeTokenError as error:
            await refused(request, error)(scope, receive, send)
            return
        if known is not None:
            await (await accepted(request, known))(scope, receive, send)
            return
        await self._run(key, digest, scope, _replayed(body, receive), send)

    async def _known(self, request: Request, key: str, digest: bytes) -> Operation | None:
        """The operation that an earlier request with this key began; None where this one is the first."""
        if not _KEY.fullmatch(key):
            raise MalformedBody("An Idempotency-Key has 1 to 255 printable characters.", param="Idempotency-Key")
        while (first := self._firsts.get(key)) is not None:
            if first.digest != digest:
                raise IdempotencyKeyReused(
                    "This Idempotency-Key came with another path or body before.", fixes=("Make a new key.",)
                )
            try:
                await asyncio.wait_for(first.answered.wait(), LONGEST_WAIT_S)
            except TimeoutError:
                raise DeadlineExceeded("The first request with this key is still being answered.") from None
            with contextlib.suppress(OperationNotFound):  # which is long over, and forgotten
                if first.operation is not None:
                    return context(request).operations.get(first.operation)
            self._forget(key, first)
        return None

    async def _run(self, key: str, digest: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        first = self._firsts[key] = _First(digest)

        async def looking(message: Message) -> None:
            first.look(message)
            await send(message)

        try:
            await self._app(scope, receive, looking)
        finally:
            first.answered.set()
            if first.operation is None:
                self._forget(key, first)
            while len(self._firsts) > KEPT:
                del self._firsts[next(iter(self._firsts))]

    def _forget(self, key: str, first: _First) -> None:
        if self._firsts.get(key) is first:
            del self._firsts[key]


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body again for the application, then whatever else comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
