"""The one stream of what happens: numbered envelopes, a ring to resume from, a bounded queue for each listener.

A listener gets stream.hello, then stream.snapshot (or the part of the ring that it missed), then everything live.
Progress and samples may be merged for a slow listener; nothing else is dropped: a listener that cannot keep up is
disconnected, and told so by the end of its stream. Lives in one event loop. Does not know HTTP, nor what the data mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any

import msgspec

from freetoken.daemon.state import utc

VERSION = 1
RING = 1024  # events kept for those who come back
QUEUE = 256  # events a listener may be behind
HEARTBEAT_S = 15.0
MERGED = frozenset({"load.progress", "engine.stats", "vram.sample", "download.progress"})


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """The envelope of docs/control-api.md, Events."""

    v: int = VERSION
    epoch: str
    seq: int
    type: str
    time: str
    source: str
    subject: str | None
    corr: str | None  # id of the operation it belongs to
    data: Any

    @property
    def id(self) -> str:
        """What a client sends back as Last-Event-ID."""
        return f"{self.epoch}:{self.seq}"


class Hub:
    """Numbers events and hands them to everyone who listens."""

    def __init__(self, epoch: str, snapshot: Callable[[], Mapping[str, Any]]) -> None:
        """`snapshot` gives {daemon, engine, operations, downloads, gpus} as JSON-ready values, as they are now."""
        self.epoch = epoch
        self._snapshot = snapshot
        self._seq = 0
        self._ring: deque[Event] = deque(maxlen=RING)
        self._listeners: set[_Listener] = set()
        self._closed = False

    def publish(
        self, type: str, data: Any, *, subject: str | None = None, corr: str | None = None, source: str = "daemon"
    ) -> Event:
        """One event to all. `data` must be JSON-ready and is not changed afterwards."""
        self._seq += 1
        event = self._envelope(type, data, source=source, subject=subject, corr=corr)
        self._ring.append(event)
        for listener in tuple(self._listeners):
            listener.put(event)
        return event

    async def listen(self, after: str | None = None, types: Iterable[str] = ()) -> AsyncGenerator[Event | None, None]:
        """Events for one listener, None where HEARTBEAT_S passed without one. Ends when it is too slow or at close().

        `after` is the id of the last event seen; `types` are prefixes (`engine`, `load.failed`), none meaning all.
        """
        listener = _Listener(("stream.", *types) if types else ("",))
        beginning = self._beginning(after)  # no await up to the end of the next line: nothing falls in between
        self._listeners.add(listener)
        if self._closed:
            listener.close()
        try:
            for event in beginning:
                if listener.wants(event):
                    yield event
            while not listener.ended:
                yield await listener.next(HEARTBEAT_S)
        finally:
            self._listeners.discard(listener)

    def close(self) -> None:
        """Ends every stream once what is queued has been read; new ones end after the snapshot."""
        self._closed = True
        for listener in self._listeners:
            listener.close()

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    def _beginning(self, after: str | None) -> list[Event]:
        hello = self._envelope("stream.hello", {"heartbeat_ms": round(HEARTBEAT_S * 1000), "ring": RING})
        if after is None:
            return [hello, self._snapshot_event()]
        missed = self._missed(after)
        if missed is None:
            gap = self._envelope(
                "stream.gap", {"after": after, "oldest_seq": self._ring[0].seq if self._ring else None}
            )
            return [hello, gap, self._snapshot_event()]
        return [hello, *missed]

    def _missed(self, after: str) -> list[Event] | None:
        """What came after `after`, or None where the ring no longer (or never) knew it."""
        epoch, _, number = after.rpartition(":")
        if epoch != self.epoch or not number.isdecimal() or int(number) > self._seq:
            return None
        seq = int(number)
        if seq < self._seq and (not self._ring or self._ring[0].seq > seq + 1):
            return None
        return [event for event in self._ring if event.seq > seq]

    def _snapshot_event(self) -> Event:
        return self._envelope("stream.snapshot", self._snapshot())

    def _envelope(
        self, type: str, data: Any, *, source: str = "daemon", subject: str | None = None, corr: str | None = None
    ) -> Event:
        return Event(
            epoch=self.epoch,
            seq=self._seq,
            type=type,
            time=utc(time.time()),
            source=source,
            subject=subject,
            corr=corr,
            data=data,
        )


class _Listener:
    """A bounded queue with one reader."""

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        self._prefixes = prefixes
        self._queue: deque[Event] = deque()
        self._wake = asyncio.Event()  # set while there is an event to read, or none will come
        self._closed = False

    @property
    def ended(self) -> bool:
        return self._closed and not self._queue

    def wants(self, event: Event) -> bool:
        return event.type.startswith(self._prefixes)

    def put(self, event: Event) -> None:
        if self._closed or not self.wants(event):
            return
        if event.type in MERGED:
            self._merge(event)
        if len(self._queue) >= QUEUE:
            self._queue.clear()
            self.close()
            return
        self._queue.append(event)
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    async def next(self, timeout_s: float) -> Event | None:
        """The next event; None after `timeout_s` without one, or where the queue was closed meanwhile."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout_s)
        if not self._queue:
            return None
        event = self._queue.popleft()
        if not self._queue and not self._closed:
            self._wake.clear()
        return event

    def _merge(self, event: Event) -> None:
        """Removes an unread event that this one makes stale: never one before an event that may not be merged."""
        for index in range(len(self._queue) - 1, -1, -1):
            queued = self._queue[index]
            if queued.type not in MERGED:
                return
            if (queued.type, queued.subject) == (event.type, event.subject):
                del self._queue[index]
                return
