"""Whether an engine that died is started again, and when: from the history of its deaths to a decision. Pure.

Back-off 1, 2, 4 ... 60 s with jitter; never where the same thing would happen again (it does not fit, the files are
damaged, a load failed twice in the same way), not a second time after a lost GPU, not after 5 deaths in 10 minutes. An
engine that answered for 10 minutes begins with a clean sheet. Does not know processes, clocks or how anything starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from freetoken.core.errors import (
    CheckpointError,
    EngineProtocolError,
    EngineStartFailed,
    FreeTokenError,
    PlanError,
    UsageError,
)
from freetoken.daemon.supervisor.autopsy import GpuLost

FIRST_S, LONGEST_S, JITTER = 1.0, 60.0, 0.2
MOST, WINDOW_S = 5, 600.0  # deaths in so much time are too many
STEADY_S = 600.0  # an engine that answered for so long owes nothing to earlier deaths

_DETERMINISTIC = (PlanError, CheckpointError, UsageError, EngineProtocolError)
_BAD_COMMAND = 2  # the engine's exit code where it cannot use its arguments or its rendezvous file
_BROKEN_INSTALLATION = ("ModuleNotFoundError", "ImportError")


class Why(StrEnum):
    """Why it is not tried again."""

    DETERMINISTIC = "deterministic"
    REPEATED = "repeated"
    GPU_LOST = "gpu_lost"
    TOO_MANY = "too_many"


@dataclass(frozen=True, slots=True)
class Crash:
    """One death, or one load that failed."""

    at: float  # seconds of any steady clock
    error: FreeTokenError
    loading: bool  # it had not answered yet
    ran_s: float = 0.0  # for how long it had answered


@dataclass(frozen=True, slots=True)
class Again:
    attempt: int  # 1 for the first restart
    after_s: float


@dataclass(frozen=True, slots=True)
class Never:
    why: Why
    attempts: int  # restarts that were tried


Decision = Again | Never


def decide(history: Sequence[Crash], jitter: Random) -> Decision:
    """What follows from the last of `history`, oldest first and not empty."""
    recent = relevant(history)
    tried = len(recent) - 1
    why = _never(recent)
    if why is not None:
        return Never(why, tried)
    after_s = min(LONGEST_S, FIRST_S * 2.0**tried * jitter.uniform(1.0 - JITTER, 1.0 + JITTER))
    return Again(tried + 1, after_s)


def relevant(history: Sequence[Crash]) -> list[Crash]:
    """The deaths that still count at the last one: in the window, and since an engine last ran steadily."""
    last = history[-1]
    kept: list[Crash] = []
    for crash in reversed(history):
        if last.at - crash.at >= WINDOW_S:
            break
        kept.insert(0, crash)
        if crash.ran_s >= STEADY_S:
            break
    return kept


def _never(recent: Sequence[Crash]) -> Why | None:
    last = recent[-1]
    if is_deterministic(last.error):
        return Why.DETERMINISTIC
    if isinstance(last.error, GpuLost) and any(isinstance(crash.error, GpuLost) for crash in recent[:-1]):
        return Why.GPU_LOST
    if len(recent) > 1 and last.loading and recent[-2].loading and _cause(last) == _cause(recent[-2]):
        return Why.REPEATED
    return Why.TOO_MANY if len(recent) >= MOST else None


def is_deterministic(error: FreeTokenError) -> bool:
    """Whether trying the same again gives the same."""
    if isinstance(error, EngineStartFailed):
        code = error.numbers.get("exit_code")
        return code is None or code == _BAD_COMMAND or any(name in error.detail for name in _BROKEN_INSTALLATION)
    return isinstance(error, _DETERMINISTIC)


def _cause(crash: Crash) -> tuple[object, ...]:
    numbers = crash.error.numbers
    return crash.error.code, numbers.get("signal"), numbers.get("exit_code"), numbers.get("oom_killed")
