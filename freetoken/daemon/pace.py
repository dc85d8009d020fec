"""Progress, at most five times a second a subject: what comes in between is withheld, the newest of it follows.

Lives in one event loop. Does not know what is sent, nor to whom.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

EVERY_S = 0.2  # shortest time between two events of one type and subject

Fields = Mapping[str, Any]  # of one event: type, subject, data, ...
Sent = TypeVar("Sent")


class Pace(Generic[Sent]):
    """Lets progress through at most every EVERY_S for each type and subject; the newest withheld one follows."""

    def __init__(self, send: Callable[..., Sent]) -> None:
        self._send = send
        self._held: dict[tuple[str, str | None], Fields | None] = {}  # None: told, and none came since
        self._timers: dict[tuple[str, str | None], asyncio.TimerHandle] = {}

    def put(self, fields: Fields) -> Sent | None:
        key = (fields["type"], fields["subject"])
        if key in self._held:
            self._held[key] = fields
            return None
        self._hold(key)
        return self._send(fields, progress=True)

    def forget(self, type: str, subject: str | None) -> None:
        """An event of the same family has made what is withheld of this subject stale."""
        if self._held:
            family = type.partition(".")[0] + "."
            for key in self._held:
                if key[1] == subject and key[0].startswith(family):
                    self._held[key] = None

    def close(self) -> None:
        """Sends what is withheld, now."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for fields in filter(None, self._held.values()):
            self._send(fields, progress=True)
        self._held.clear()

    def _hold(self, key: tuple[str, str | None]) -> None:
        self._held[key] = None
        self._timers[key] = asyncio.get_running_loop().call_later(EVERY_S, self._release, key)

    def _release(self, key: tuple[str, str | None]) -> None:
        fields = self._held.pop(key)
        del self._timers[key]
        if fields is not None:
            self._hold(key)
            self._send(fields, progress=True)
