"""The deaths of the engine, what follows from them, and the restart that is due.

Tells engine.crashed, engine.restart_scheduled and engine.given_up and keeps the diagnosis. Does not know how an engine
is started: it asks for that when the time has come. Lives in one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from freetoken.core.errors import FreeTokenError
from freetoken.daemon.errors import problem
from freetoken.daemon.state import utc
from freetoken.daemon.supervisor.restart import Again, Crash, Decision, Never, decide, relevant
from freetoken.daemon.supervisor.telling import CRASHED, Teller
from freetoken.daemon.supervisor.wish import Wish


@dataclass(frozen=True, slots=True)
class Pending:
    """A restart that is due later."""

    wish: Wish
    attempt: int
    due: float  # monotonic

    @property
    def in_s(self) -> float:
        return max(0.0, self.due - time.monotonic())


class Crashes:
    """`again` starts the wish of a restart; it is called on the event loop and does not wait."""

    def __init__(self, tell: Teller, again: Callable[[Wish], None], jitter: Random) -> None:
        self.pending: Pending | None = None
        self._tell, self._again, self._jitter = tell, again, jitter
        self._history: list[Crash] = []
        self._timer: asyncio.TimerHandle | None = None

    def died(self, wish: Wish, error: FreeTokenError, ran_s: float, last_lines: list[str]) -> None:
        """An engine that had answered for `ran_s` is gone."""
        decision = self._decide(Crash(time.monotonic(), error, False, ran_s))
        again = decision if isinstance(decision, Again) else None
        numbers = error.numbers
        data = {
            "exit": numbers.get("exit_code"),
            "signal": numbers.get("signal"),
            "oom_killed": bool(numbers.get("oom_killed")),
            "last_lines": last_lines,
            "attempt": again.attempt if again else None,
            "backoff_ms": round(again.after_s * 1000) if again else None,
            "error": problem(error),
        }
        self._tell.publish("engine.crashed", data, model=wish.row.id)
        self._follow(wish, error, decision, last_lines)

    def failed(self, wish: Wish, error: FreeTokenError, last_lines: list[str]) -> None:
        """A load that nobody waits for did not succeed."""
        self._follow(wish, error, self._decide(Crash(time.monotonic(), error, True)), last_lines)

    def call_off(self) -> None:
        """The restart that is due, if one is, does not take place."""
        self.pending = None
        if self._timer is not None:
            self._timer.cancel()

    def forget(self) -> None:
        """Somebody has taken charge: nothing counts any more."""
        self.call_off()
        self._history.clear()

    def view(self) -> dict[str, Any] | None:
        """The restart that is due, JSON-ready."""
        due = self.pending
        return {"attempt": due.attempt, "in_ms": round(due.in_s * 1000), "model": due.wish.row.id} if due else None

    def _decide(self, crash: Crash) -> Decision:
        self._history = relevant([*self._history, crash])
        return decide(self._history, self._jitter)

    def _follow(self, wish: Wish, error: FreeTokenError, decision: Decision, last_lines: list[str]) -> None:
        self._tell.diagnose(CRASHED, error, last_lines)
        model = wish.row.id
        match decision:
            case Never(why, attempts):
                data: dict[str, Any] = {"why": why.value, "attempts": attempts, "error": problem(error)}
                self._tell.publish("engine.given_up", data, model=model)
            case Again(attempt, after_s):
                self.pending = Pending(wish, attempt, time.monotonic() + after_s)
                self._timer = asyncio.get_running_loop().call_later(after_s, self._due)
                data = {"attempt": attempt, "backoff_ms": round(after_s * 1000), "at": utc(time.time() + after_s)}
                self._tell.publish("engine.restart_scheduled", data, model=model)

    def _due(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            self._again(pending.wish)
