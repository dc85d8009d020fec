"""Generations in flight on one event loop: events come in by request id, each caller reads its own.

Shared by the two backends (wire.remote, engine.inproc), so that both end, fail and cancel alike. Does not know where
events come from. Not thread-safe: everything happens on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from freetoken.core.errors import EngineDied, UsageError
from freetoken.core.events import Failed, GenerationEvent, Tokens
from freetoken.core.types import GenerateRequest


class Streams:
    """`submit` and `cancel` are how the backend tells its engine; neither waits."""

    def __init__(self, submit: Callable[[GenerateRequest], None], cancel: Callable[[str], None]) -> None:
        self._submit, self._cancel = submit, cancel
        self._queues: dict[str, asyncio.Queue[GenerationEvent | EngineDied]] = {}
        self._gone: EngineDied | None = None
        self._idle_since = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last stream ended; 0 while one runs."""
        return 0.0 if self._queues else time.monotonic() - self._idle_since

    async def run(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        """The events of `request` until its last one. Closed early, it cancels exactly once.

        Raises EngineDied when the engine goes (or is already gone), UsageError for an id that is in flight.
        """
        if self._gone is not None:
            raise _again(self._gone)
        if request.id in self._queues:
            raise UsageError(f"A request with the id {request.id} is already running.")
        queue = self._queues[request.id] = asyncio.Queue()
        over = False
        try:
            self._submit(request)
            while not over:
                event = await queue.get()  # `end` wakes everybody when the engine goes
                over = _is_last(event)
                if isinstance(event, EngineDied):
                    raise event
                yield event
        finally:
            del self._queues[request.id]
            self._idle_since = time.monotonic()
            if not over:
                self._cancel(request.id)

    def deliver(self, request_id: str, event: GenerationEvent) -> None:
        """Hand `event` to its reader; dropped where the reader has gone away."""
        if (queue := self._queues.get(request_id)) is not None:
            queue.put_nowait(event)

    def end(self, reason: EngineDied) -> None:
        """The engine is gone: every stream, running or to come, raises `reason`. Only the first call counts."""
        if self._gone is None:
            self._gone = reason
            for queue in self._queues.values():
                queue.put_nowait(_again(reason))


def _is_last(event: GenerationEvent | EngineDied) -> bool:
    return isinstance(event, Failed | EngineDied) or (isinstance(event, Tokens) and event.finish is not None)


def _again(error: EngineDied) -> EngineDied:
    """A copy, so that two readers do not share one traceback."""
    return EngineDied(error.detail, numbers=error.numbers, fixes=error.fixes)
