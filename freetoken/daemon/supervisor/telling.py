"""What the supervisor says: events under the engine's name, and diagnoses that stand until they are cleared.

Does not know when anything is to be said.
"""

from __future__ import annotations

from typing import Any

from freetoken.core.errors import FreeTokenError
from freetoken.daemon.errors import problem
from freetoken.daemon.events import Hub

CRASHED, MEMORY_HELD = "engine.crashed", "engine.memory_held"  # ids of diagnoses


class Teller:
    """The supervisor's voice in the event stream."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._standing: dict[str, dict[str, Any]] = {}

    def publish(self, type: str, data: Any, *, model: str | None, corr: str | None = None) -> None:
        self._hub.publish(type, data, subject=model, corr=corr, source="supervisor")

    def line(self, line: str) -> None:
        """One line of the engine's output."""
        self._hub.publish("log.line", {"line": line}, subject="engine", source="engine")

    def dropped(self, count: int) -> None:
        self._hub.publish("log.dropped", {"source": "engine", "count": count}, subject="engine", source="engine")

    # ── diagnoses ───────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def diagnoses(self) -> list[dict[str, Any]]:
        """Those that stand, oldest first."""
        return list(self._standing.values())

    def diagnose(self, id: str, error: FreeTokenError, evidence: list[str]) -> None:
        """Something is wrong and stays so until it is cleared; said again, it is updated."""
        told = problem(error)
        diagnosis = {
            "id": id,
            "status": "fail",
            "code": told["code"],
            "title": told["title"],
            "detail": told["detail"],
            "evidence": evidence,
            "fixes": told["fixes"],
        }
        known = id in self._standing
        self._standing[id] = diagnosis
        self._hub.publish(f"diagnosis.{'updated' if known else 'raised'}", diagnosis, subject=id, source="supervisor")

    def clear(self, *ids: str) -> None:
        for id in ids:
            if self._standing.pop(id, None) is not None:
                self._hub.publish("diagnosis.cleared", {"id": id}, subject=id, source="supervisor")
