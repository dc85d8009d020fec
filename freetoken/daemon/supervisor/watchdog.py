"""Whether an engine that is connected still lives: from what it sent to a verdict. Pure.

Two ways to hang: nothing comes any more (stopped, swapped out, its event loop stuck), or it beats but the step that it
computes never ends. Silence is counted in looks and not in time, so that a computer that slept, or a daemon that was
held up itself, accuses nobody. Does not know processes or sockets.
"""

from __future__ import annotations

from dataclasses import dataclass

LOOK_S = 1.0  # between two looks
SILENT_LOOKS = 30  # looks without any message: an engine beats once a second
STEP_S = 30.0  # longest step; a long one reports progress


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of the engine at one look."""

    received: int  # messages so far
    step: int  # the number of the step that is computed
    step_age_ms: int  # 0 when none is


@dataclass(frozen=True, slots=True)
class Hang:
    """Why an engine is held to be hanging."""

    reason: str  # "silent" | "step"
    silent_s: float
    step: int
    step_age_ms: int

    @property
    def sentence(self) -> str:
        """As the rest of "The engine process ..."."""
        if self.reason == "silent":
            return f"sent nothing for {self.silent_s:g} s"
        return f"did not finish step {self.step} in {self.step_age_ms / 1000:.0f} s"


class Watchdog:
    """One engine's. `look` is called every LOOK_S seconds."""

    def __init__(self) -> None:
        self._received = -1
        self._silent = 0

    def look(self, seen: Seen) -> Hang | None:
        """A Hang where the engine is to be ended."""
        self._silent = 0 if seen.received != self._received else self._silent + 1
        self._received = seen.received
        if self._silent >= SILENT_LOOKS:
            return self._hang("silent", seen)
        return self._hang("step", seen) if seen.step_age_ms > STEP_S * 1000 else None

    def _hang(self, reason: str, seen: Seen) -> Hang:
        return Hang(reason, self._silent * LOOK_S, seen.step, seen.step_age_ms)
