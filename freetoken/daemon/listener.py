"""What one listener of the event stream gets: the envelope, its filter, and a bounded queue with one reader.

Progress may be merged while it waits; nothing else is dropped: a listener that falls too far behind is cut off, and
resumes (events.py). Lives in one event loop. Does not know where events come from, nor HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

VERSION = 1
QUEUE = 256  # events a listener may be behind
HEARTBEAT_S = 15.0
UNNUMBERED = frozenset({"stream.hello", "stream.gap", "stream.heartbeat"})  # resuming from one would miss a snapshot


class Event(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The envelope of docs/control-api.md, Events."""

    v: int = VERSION
    epoch: str  # of this start of the daemon
    seq: int  # of the newest event; hello, snapshot and gap carry the number of the event before them
    type: str
    time: str  # RFC 3339
    source: str
    subject: str | None
    corr: str | None  # id of the operation it belongs to
    data: Any

    @property
    def id(self) -> str:
        """What a client sends back as Last-Event-ID."""
        return f"{self.epoch}:{self.seq}"

    @cached_property
    def json(self) -> bytes:
        """The envelope on the wire, encoded once for all listeners."""
        return msgspec.json.encode(self)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A listener's filter: event types by prefix (`engine`, `load.failed`), subjects whole; none means all."""

    types: tuple[str, ...] = ()
    subjects: frozenset[str] = frozenset()

    def __call__(self, event: Event) -> bool:
        if event.type.startswith("stream."):
            return True
        of_type = not self.types or event.type.startswith(self.types)
        return of_type and (not self.subjects or event.subject in self.subjects)


class Listener:
    """A bounded queue with one reader: an async iterator of events, and of None where HEARTBEAT_S passed without."""

    def __init__(
        self, beginning: Iterable[Event], wants: Callable[[Event], bool], leave: Callable[[Listener], None]
    ) -> None:
        self._beginning = deque(event for event in beginning if wants(event))
        self._wants, self._leave = wants, leave
        self._queue: dict[int, Event] = {}  # by seq, oldest first
        self._progress: dict[tuple[str, str | None], int] = {}  # what is queued of it, by seq
        self._wake = asyncio.Event()  # set while there is an event to read, or none will come
        self._closed = False
        self.cut = asyncio.Event()  # set when it fell too far behind: nothing more will come, whoever sends may stop

    @property
    def ended(self) -> bool:
        return self._closed and not self._queue and not self._beginning

    def put(self, event: Event, *, progress: bool) -> None:
        if self._closed or not self._wants(event):
            return
        if progress:
            self._queue.pop(self._progress.get((event.type, event.subject), 0), None)  # stale now
            self._progress[event.type, event.subject] = event.seq
        if len(self._queue) >= QUEUE:
            self._queue.clear()
            self.cut.set()
            self.end()
            return
        self._queue[event.seq] = event
        self._wake.set()

    def end(self) -> None:
        """Nothing more comes; what is queued can still be read."""
        self._closed = True
        self._wake.set()

    def close(self) -> None:
        """The reader is gone."""
        self.end()
        self._leave(self)

    async def take(self, most: int = QUEUE) -> list[Event]:
        """What waits to be read, oldest first; empty after HEARTBEAT_S without an event, and at the end."""
        if self._beginning:
            return [self._beginning.popleft() for _ in range(min(most, len(self._beginning)))]
        if not self._wake.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), HEARTBEAT_S)
        taken = list(self._queue.values())[:most]
        if len(taken) == len(self._queue):
            self._queue.clear()
            self._progress.clear()
        else:
            for event in taken:
                del self._queue[event.seq]
        if not self._queue and not self._closed:
            self._wake.clear()
        return taken

    def __aiter__(self) -> Listener:
        return self

    async def __anext__(self) -> Event | None:
        if self.ended:
            raise StopAsyncIteration
        taken = await self.take(1)
        return taken[0] if taken else None

    async def aclose(self) -> None:
        """For contextlib.aclosing."""
        self.close()
