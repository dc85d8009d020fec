"""The newest log lines of the daemon and of the engine, numbered, made harmless, told as log.line events.

A page reads them (GET /logs), a stream follows them. Each source has a ring of its own, so that a flood of one hides
nothing of the other; a source that floods is told up to a rate, the rest is counted in log.dropped and can still be
read. Lives in one event loop, but for Handler. Does not know where the lines come from, nor HTTP.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from freetoken.daemon.events import Hub
from freetoken.daemon.state import utc

KEPT = 2000  # lines of each source
TOLD = 200  # lines of one source told in a window
WINDOW_S = 1.0
TAIL_BYTES = 64 << 10  # read of an older log file, for what happened before this daemon
PAGE = 1000  # lines in one answer at most

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)
Clean = Callable[[str], str]

_WORD = re.compile(r"\b(DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b")
_NAMED: Mapping[str, Level] = {"DEBUG": "debug", "INFO": "info", "WARN": "warning", "WARNING": "warning"}
_CREDENTIAL = re.compile(r"\b(?:hf_|sk-)[A-Za-z0-9_-]{12,}|(?i:(?<=bearer )|(?<=freetoken\.token\.))[\w.~+/=-]{8,}")
_RECORD = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ([A-Z]+) (.*)")  # as Formatter writes it


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line; `seq` counts the lines of this daemon, oldest first."""

    seq: int
    time: str | None  # RFC 3339; null for a line of an older run that does not say
    source: str  # daemon | engine
    level: Level
    line: str


class Redactor:
    """Takes out of a line what must not be in a log: our own secrets, and what looks like somebody's."""

    def __init__(self, clean: Clean, secrets: Iterable[str | None]) -> None:
        """`clean` makes the line harmless for a terminal and hides the home folder."""
        self._clean = clean
        self._secrets = [secret for secret in secrets if secret]

    def __call__(self, line: str) -> str:
        shown = self._clean(line)
        for secret in self._secrets:
            shown = shown.replace(secret, "[redacted]")
        return _CREDENTIAL.sub("[redacted]", shown)


class LogBook:
    """The rings, and the events."""

    def __init__(self, hub: Hub, redact: Clean) -> None:
        """From now on `hub` gives the data of every log.line event to this book first."""
        self._hub, self._redact = hub, redact
        self._seq = 0
        self._rings: dict[str, deque[Line]] = {}
        self._rates: dict[str, _Rate] = {}
        hub.stage("log.line", self._take)

    def remember(self, source: str, file: Path) -> None:
        """The end of an older log file, as lines that are not told."""
        for text in _tail(file):
            found = _RECORD.fullmatch(text)
            if found is None:
                self._keep(source, text, None, when=None)
            else:
                self._keep(source, found[4], found[3], when=_utc(found[1], found[2]))

    def page(self, *, source: str | None, level: Level, after: int | None, limit: int) -> list[Line]:
        """At most `limit` lines of at least `level`, oldest first: the next after `after`, or else the newest."""
        rings = [ring for name, ring in self._rings.items() if source in (None, name)]
        least = LEVELS.index(level)
        lines = heapq.merge(*rings, key=lambda line: line.seq)
        found = (line for line in lines if line.seq > (after or 0) and LEVELS.index(line.level) >= least)
        return list(deque(found, maxlen=limit)) if after is None else list(islice(found, limit))

    @property
    def newest(self) -> int:
        """The number of the newest line."""
        return self._seq

    def _take(self, data: Mapping[str, Any], source: str) -> dict[str, Any] | None:
        line = self._keep(source, str(data["line"]), data.get("level"), when=utc(time.time()))
        rate = self._rates.setdefault(source, _Rate())
        return msgspec.to_builtins(line) if rate.allows(lambda: self._tell_dropped(source)) else None

    def _keep(self, source: str, text: str, level: str | None, *, when: str | None) -> Line:
        self._seq += 1
        shown = self._redact(text)
        line = Line(seq=self._seq, time=when, source=source, level=_level(level, shown), line=shown)
        self._rings.setdefault(source, deque(maxlen=KEPT)).append(line)
        return line

    def _tell_dropped(self, source: str) -> None:
        dropped = self._rates.pop(source).dropped
        if dropped:
            self._hub.publish("log.dropped", {"source": source, "count": dropped}, subject=source, source=source)


class _Rate:
    """TOLD in each window, which begins with the first of them; what is over is counted."""

    def __init__(self) -> None:
        self._told = 0
        self.dropped = 0

    def allows(self, at_end: Callable[[], None]) -> bool:
        if self._told == 0:
            asyncio.get_running_loop().call_later(WINDOW_S, at_end)
        self._told += 1
        self.dropped += self._told > TOLD
        return self._told <= TOLD


class Handler(logging.Handler):
    """Hands the daemon's own records, from any thread, to the event stream."""

    def __init__(self, hub: Hub, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(logging.INFO)
        self._hub, self._loop = hub, loop

    def emit(self, record: logging.LogRecord) -> None:
        data = {"level": record.levelname, "line": f"{record.name}: {record.getMessage()}"}
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, data)

    def _tell(self, data: dict[str, str]) -> None:
        self._hub.publish("log.line", data, subject="daemon", source="daemon")


class Formatter(logging.Formatter):
    """Records for a file: redacted; further lines are set in, so that no message can look like another record."""

    def __init__(self, redact: Clean) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        return "\n    ".join(self._redact(line) for line in super().format(record).splitlines())


def _level(given: str | None, line: str) -> Level:
    """`given` in our words, or else what the line says of itself."""
    word = (given or "").upper()
    if not word:
        found = _WORD.search(line[:80])
        word = found[1] if found else "ERROR" if line.startswith("Traceback (most recent") else "INFO"
    return _NAMED.get(word, "error")


def _tail(file: Path) -> list[str]:
    """Whole lines at the end of `file`; none where it cannot be read."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - TAIL_BYTES))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = text.splitlines()
    return lines[1:] if size > TAIL_BYTES else lines


def _utc(local: str, milliseconds: str) -> str:
    return utc(datetime.fromisoformat(local).astimezone().timestamp() + int(milliseconds) / 1000)
