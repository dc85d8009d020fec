"""The one stream of what happens: numbered envelopes, rings to resume from, listeners.

A listener gets stream.hello, then stream.snapshot (or exactly the events that it missed), then everything live.
Progress and samples are told at most five times a second a subject and may be merged for a slow listener; nothing else
is dropped. What can be resumed is kept by class, so that no flood of log lines, requests or samples pushes a state, a
diagnosis or an error out. Lives in one event loop. Does not know HTTP, nor what the data mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from freetoken.core.errors import TooManyStreams
from freetoken.daemon.listener import HEARTBEAT_S, Event, Listener, Wanted
from freetoken.daemon.pace import Pace
from freetoken.daemon.state import utc

RING = 1024  # events of each class kept for those who come back
LASTING = (
    "daemon.",
    "engine.",
    "load.",
    "vram.",
    "plan.",
    "diagnosis.",
    "download.",
    "operation.",
)  # make up the state
STREAMS = 64  # listeners at a time: there is one token, so this is the bound for a token
PROGRESS = frozenset({"load.progress", "engine.stats", "vram.sample", "download.progress"})

EVERYTHING = Wanted()

Stage = Callable[[Any, str], Any]  # (data, source) -> the data to publish, or None for nothing


@dataclass(frozen=True, slots=True)
class Query:
    """How one listener wants its stream: `after` is the id of the last event it saw, `snapshot` replaces the hub's."""

    after: str | None = None
    wants: Callable[[Event], bool] = EVERYTHING
    snapshot: Callable[[], Mapping[str, Any]] | None = None


class Hub:
    """Numbers events and hands them to everyone who listens."""

    def __init__(self, epoch: str, snapshot: Callable[[], Mapping[str, Any]]) -> None:
        """`snapshot` gives {daemon, engine, operations, downloads, gpus} as JSON-ready values, as they are now."""
        self.epoch = epoch
        self._snapshot = snapshot
        self._seq = 0
        self._lasting, self._progress = _Ring(), _Ring()
        self._passing: dict[str, _Ring] = {}  # by family: log, request
        self._pace = Pace(self._send)
        self._stages: dict[str, Stage] = {}
        self._listeners: set[Listener] = set()
        self._closed = False
        self._left = asyncio.Event()  # the last listener, after close()

    def stage(self, type: str, prepare: Stage) -> None:
        """`prepare` sees the data of every event of `type` before it is numbered, and may withhold it."""
        self._stages[type] = prepare

    def publish(
        self,
        type: str,
        data: Any,
        *,
        subject: str | None = None,
        corr: str | None = None,
        source: str = "daemon",
        progress: bool = False,
    ) -> Event | None:
        """One event to all; None where it is withheld. `data` must be JSON-ready and is not changed afterwards.

        Progress (the types of PROGRESS, and what the caller says is) is sent at most five times a second a
        subject: the newest that came meanwhile follows, unless an event of the same family has made it stale.
        """
        prepare = self._stages.get(type)
        if prepare is not None and (data := prepare(data, source)) is None:
            return None
        fields = {"type": type, "data": data, "subject": subject, "corr": corr, "source": source}
        if progress or type in PROGRESS:
            return self._pace.put(fields)
        self._pace.forget(type, subject)
        return self._send(fields, progress=False)

    def listen(self, query: Query | None = None) -> Listener:
        """A listener, from now on; close it. Raises TooManyStreams."""
        if len(self._listeners) >= STREAMS:
            raise TooManyStreams(
                f"{STREAMS} event streams are open, which is the most.",
                numbers={"limit": STREAMS},
                fixes=("Close one of them.",),
            )
        query = query or Query()
        listener = Listener(self._beginning(query), query.wants, self._leave)
        self._listeners.add(listener)
        if self._closed:
            listener.end()
        return listener

    def heartbeat(self) -> Event:
        """Says that the stream lives, to those who cannot see comments or pings."""
        return self._envelope("stream.heartbeat", {})

    def close(self) -> None:
        """Ends every stream once what is queued has been read; new ones end after the snapshot."""
        self._pace.close()
        self._closed = True
        for listener in self._listeners:
            listener.end()
        self._look_whether_all_left()

    async def all_left(self, timeout_s: float) -> None:
        """After close(): until every listener has gone, or `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._left.wait(), timeout_s)

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    def _send(self, fields: Mapping[str, Any], *, progress: bool) -> Event:
        self._seq += 1
        event = self._envelope(**fields)
        self._ring(event.type, progress=progress).add(event)
        for listener in tuple(self._listeners):
            listener.put(event, progress=progress)
        return event

    def _leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        self._look_whether_all_left()

    def _look_whether_all_left(self) -> None:
        if self._closed and not self._listeners:
            self._left.set()

    def _ring(self, type: str, *, progress: bool) -> _Ring:
        if progress:
            return self._progress
        return self._lasting if type.startswith(LASTING) else self._passing.setdefault(type.partition(".")[0], _Ring())

    def _beginning(self, query: Query) -> list[Event]:
        hello = self._envelope("stream.hello", {"heartbeat_ms": round(HEARTBEAT_S * 1000), "ring": RING})
        snapshot = query.snapshot or self._snapshot
        if query.after is None:
            return [hello, self._envelope("stream.snapshot", snapshot())]
        seq = self._seq_of(query.after)
        if seq is None or self._lasting.lost > seq:
            return [hello, self._gap(query.after, snapshot=True), self._envelope("stream.snapshot", snapshot())]
        rings = (self._lasting, self._progress, *self._passing.values())
        missed = list(heapq.merge(*(ring.after(seq) for ring in rings), key=lambda event: event.seq))
        if any(ring.lost > seq for ring in self._passing.values()):
            missed.insert(0, self._gap(query.after, snapshot=False))
        return [hello, *missed]

    def _seq_of(self, id: str) -> int | None:
        """None where it is not of an event of this daemon."""
        epoch, _, number = id.rpartition(":")
        if epoch != self.epoch or not (number.isascii() and number.isdecimal()) or len(number) > 18:
            return None
        return int(number) if int(number) <= self._seq else None

    def _gap(self, after: str, *, snapshot: bool) -> Event:
        """Without a snapshot: all that lasts follows, and only some of what passes is lost."""
        return self._envelope("stream.gap", {"after": after, "snapshot": snapshot})

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


class _Ring:
    """The newest events of one class, each class in a ring of its own so that no flood pushes out another."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self.lost = 0  # the highest seq that is no longer here

    def add(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) > RING:
            self.lost = self._events.popleft().seq

    def after(self, seq: int) -> list[Event]:
        newer: list[Event] = []
        for event in reversed(self._events):
            if event.seq <= seq:
                break
            newer.append(event)
        newer.reverse()
        return newer
