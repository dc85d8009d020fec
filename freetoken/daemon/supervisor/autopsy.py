"""Why an engine process ended: from exit code, last lines and memory to one typed error. Pure.

Does not know processes; child.py gathers the facts.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.core.errors import EngineDied, EngineError, EngineStartFailed, Number
from freetoken.core.units import Bytes

LOW_MEMORY = 0.05  # of the machine: below this a SIGKILL that nobody sent was most likely the kernel's
LAST_LINES = 20


@dataclass(frozen=True, slots=True)
class Death:
    """What was left."""

    exit_code: int | None  # negative: the signal; None: it had to be killed because it did not answer
    signal: str | None  # its name
    last_lines: tuple[str, ...]
    loading: bool  # it had not said ready
    kernel_oom_kills: int  # by the kernel's count, while it ran
    least_free: Bytes  # memory available at the last look
    total: Bytes

    @property
    def oom_killed(self) -> bool:
        """Whether the kernel ended it for lack of memory: known by the kernel's count, else guessed."""
        low = self.least_free < LOW_MEMORY * self.total
        return self.signal == "SIGKILL" and (self.kernel_oom_kills > 0 or low)


def explain(death: Death) -> EngineError:
    """One sentence with the numbers, and what to do."""
    numbers: dict[str, Number] = {"oom_killed": int(death.oom_killed)}
    if death.exit_code is not None:
        numbers["exit_code"] = death.exit_code
    if death.signal:
        numbers["signal"] = death.signal
    when = " while it loaded the model" if death.loading else ""
    kind = EngineStartFailed if death.loading and death.signal is None else EngineDied
    return kind(f"The engine process {_cause(death, when)}.", numbers=numbers, fixes=_fixes(death))


def _cause(death: Death, when: str) -> str:
    if death.oom_killed:
        free = f"{death.least_free} of {death.total} were free"
        return f"was ended by the system{when} because memory ran out (SIGKILL; {free})"
    if death.signal == "SIGKILL":
        return f"was killed from outside{when} (SIGKILL)"
    if death.signal:
        return f"crashed{when} ({death.signal})" + _last_words(death)
    if death.exit_code is None:
        return f"no longer answered{when} and was ended"
    return f"ended by itself{when} (exit code {death.exit_code})" + _last_words(death)


def _last_words(death: Death) -> str:
    """The last line that says something: of a Python traceback that is the exception."""
    said = next((line.strip() for line in reversed(death.last_lines) if line.strip()), "")
    return f"; its last words: {said[:300]}" if said else ""


def _fixes(death: Death) -> tuple[str, ...]:
    if death.oom_killed:
        return (
            "Close other programs, then load again",
            "Load with a smaller context (--num-tokens)",
            "Load with less of the memory (--memory-ratio)",
        )
    return ("Load the model again", "Look into logs/engine.log in the state folder")
