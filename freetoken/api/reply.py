"""Sends one answer, streamed or whole, over ASGI, and stops it when the client goes away.

Does not know how the answer is made (pipeline.py) or spelled (a Writer: openai_chat.py, ...).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from freetoken.api import sse
from freetoken.api.assembly import Delta, Done, Scored
from freetoken.api.errors import as_known, error_body, error_headers
from freetoken.api.pipeline import Update, Waiting
from freetoken.core.errors import FreeTokenError

logger = logging.getLogger(__name__)

Outcome = Update | FreeTokenError
_ENCODER = msgspec.json.Encoder()


class Writer(Protocol):
    """How one API spells an answer. The stream is start, deltas, end; each returns the bytes of whole events."""

    def start(self) -> bytes: ...

    def delta(self, delta: Delta) -> bytes: ...

    def end(self, done: Done) -> bytes: ...

    def whole(self, text: str, scores: tuple[Scored, ...], done: Done) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...


def json_reply(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    headers = {"cache-control": "no-store", **(headers or {})}
    return Response(_ENCODER.encode(body), status, headers, media_type="application/json")


def error_reply(error: FreeTokenError, request_id: str) -> Response:
    headers = {"x-request-id": request_id, **error_headers(error)}
    return json_reply(error_body(error), error.http_status, headers)


class Reply:
    """An answer on its way to one client, as an ASGI application. Closes `updates` however it ends."""

    def __init__(
        self, updates: AsyncGenerator[Update, None], writer: Writer, request_id: str, stalled_client_s: float
    ) -> None:
        self._updates = updates
        self._writer = writer
        self._request_id = request_id
        self._stalled_client_s = stalled_client_s
        self._sends_begun = 0
        self._sends_done = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs until the answer is sent, or the client is gone or reads nothing any more: whichever is first."""
        delivery = asyncio.create_task(self._deliver(scope, receive, self._counting(send)))
        departure = asyncio.create_task(_departure(receive))
        try:
            await self._first_of(delivery, departure)
        finally:
            delivery.cancel()  # nothing, when it is done
            departure.cancel()
            await asyncio.wait({delivery, departure})
        if not delivery.cancelled():
            delivery.result()

    async def _first_of(self, *tasks: asyncio.Task[None]) -> None:
        """Returns early when no byte moved for so long; an answer cut short makes the server close the connection.

        Looking now and then costs nothing a token, which a timer around each send would.
        """
        seen = -1
        while not (await asyncio.wait(tasks, timeout=self._stalled_client_s, return_when=asyncio.FIRST_COMPLETED))[0]:
            if self._sends_begun > self._sends_done == seen:
                logger.warning("request %s: the client read nothing for %g s", self._request_id, self._stalled_client_s)
                return
            seen = self._sends_done

    def _counting(self, send: Send) -> Send:
        async def counting(message: Any) -> None:
            self._sends_begun += 1
            await send(message)
            self._sends_done += 1

        return counting

    async def _deliver(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._outcomes()) as outcomes:
            rest = await self._send(outcomes, send)
        if rest is not None:
            await rest(scope, receive, send)

    async def _send(self, outcomes: AsyncIterator[Outcome], send: Send) -> Response | None:
        """Sends the answer as it comes; returns what is to be sent instead of it, or at its end."""
        raise NotImplementedError

    async def _outcomes(self) -> AsyncGenerator[Outcome, None]:
        """The updates; an error is the last of them instead of being raised."""
        async with aclosing(self._updates) as updates:
            try:
                async for update in updates:
                    yield update
            except Exception as error:  # noqa: BLE001 - the client is told, and what is unknown is logged
                yield as_known(error, self._request_id)


class StreamReply(Reply):
    """Events as they come; an error before the first of them is an HTTP status, a later one an event."""

    async def _send(self, outcomes: AsyncIterator[Outcome], send: Send) -> Response | None:
        begun = spoken = False
        async for outcome in outcomes:
            if not begun:
                if isinstance(outcome, FreeTokenError):
                    return error_reply(outcome, self._request_id)
                await send(self._head())
                begun = True
            opening = b""
            if not spoken and isinstance(outcome, Delta | Done):
                opening, spoken = self._writer.start(), True
            await send({"type": "http.response.body", "body": opening + self._spell(outcome), "more_body": True})
        await send({"type": "http.response.body"})
        return None

    def _head(self) -> dict[str, Any]:
        headers = [*sse.HEADERS, (b"x-request-id", self._request_id.encode())]
        return {"type": "http.response.start", "status": 200, "headers": headers}

    def _spell(self, outcome: Outcome) -> bytes:
        match outcome:
            case Delta():
                return self._writer.delta(outcome)
            case Waiting():
                return sse.WAITING
            case Done():
                return self._writer.end(outcome) + sse.DONE
            case FreeTokenError():
                return sse.event(error_body(outcome))  # and no [DONE]: the answer is not whole


class WholeReply(Reply):
    """One JSON body at the end; any error is an HTTP status."""

    async def _send(self, outcomes: AsyncIterator[Outcome], send: Send) -> Response | None:
        text: list[str] = []
        scores: list[Scored] = []
        async for outcome in outcomes:
            match outcome:
                case Delta():
                    text.append(outcome.text)
                    scores += outcome.scores
                case Done():
                    body = self._writer.whole("".join(text), tuple(scores), outcome)
                    return json_reply(body, headers={"x-request-id": self._request_id})
                case FreeTokenError():
                    return error_reply(outcome, self._request_id)
        return None


async def _departure(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
