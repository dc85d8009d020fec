"""How far a load is, told to its operation and to the event stream, at most five times a second.

Does not know what the phases do.
"""

from __future__ import annotations

import time

from freetoken.daemon.events import Hub
from freetoken.daemon.operations import Operations
from freetoken.daemon.state import Progress

EVERY_S = 0.2


class LoadProgress:
    """One load's reporter."""

    def __init__(self, hub: Hub, operations: Operations, operation_id: str, model: str) -> None:
        self._hub, self._operations = hub, operations
        self._id, self._model = operation_id, model
        self._phase: str | None = None
        self._told = 0.0

    @property
    def phase(self) -> str:
        return self._phase or "resolve"

    def enter(self, phase: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        """The load is in `phase`. A new phase and the end of one are always told, what is between now and then."""
        now = time.monotonic()
        new, complete = phase != self._phase, total > 0 and done >= total
        if not (new or complete or now - self._told >= EVERY_S):
            return
        self._phase, self._told = phase, now
        progress = Progress(done, total, unit) if total else None
        data = {"phase": phase, "done": done, "total": total or None, "unit": unit}
        if new:
            self._tell("load.phase", data)
        if total:
            self._tell("load.progress", data)
        self._operations.advance(self._id, phase, progress)

    def _tell(self, type: str, data: dict[str, object]) -> None:
        self._hub.publish(type, data, subject=self._model, corr=self._id, source="supervisor")
