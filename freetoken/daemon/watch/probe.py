"""One look at the NVIDIA cards and one at the pin limit, each in a child process with a deadline.

The answer is one of three: found, nothing (and why), or no answer, which is not the same as nothing. Does not know what
the facts are good for (doctor/, plan/).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from freetoken.core.units import Bytes
from freetoken.daemon.watch.ask import NoAnswer, ask
from freetoken.daemon.watch.cards import Card

PROBE_S = 6.0  # a driver that must first be woken takes two
PIN_S = 7.0
PINNING_S = 3.0  # of these the child pins; the rest is for the CUDA context
PIN_MOST = 4 << 30  # bytes
GPU_PROBE = (sys.executable, "-m", "freetoken.daemon.watch.probe_child")
PIN_PROBE = (sys.executable, "-m", "freetoken.daemon.watch.pin_child")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """A driver that answers, and its cards; perhaps none."""

    cards: tuple[Card, ...]
    driver: str | None = None  # "580.95.05"
    cuda: tuple[int, int] | None = None  # the newest CUDA that the driver runs


@dataclass(frozen=True, slots=True)
class Nothing:
    """No usable driver. `installed` where its library is there all the same."""

    reason: str
    installed: bool = False


@dataclass(frozen=True, slots=True)
class Pinned:
    """`pinned` bytes were pinned; more was `refused`, or not tried. `corrupt` samples did not survive a round trip."""

    pinned: Bytes
    refused: bool
    corrupt: int
    error: str | None = None


Probe = Found | Nothing | NoAnswer
PinProbe = Pinned | Nothing | NoAnswer


def probe_gpus(command: Sequence[str] = GPU_PROBE, deadline_s: float = PROBE_S) -> Probe:
    """The cards as NVIDIA's library gives them. Takes at most `deadline_s` and a moment."""
    document = ask(command, deadline_s)
    if isinstance(document, NoAnswer):
        return document
    if "reason" in document:
        return _typed(document, Nothing)
    return _typed(document, Found)


def probe_pins(available: Bytes, command: Sequence[str] = PIN_PROBE, deadline_s: float = PIN_S) -> PinProbe:
    """How much the CUDA driver pins, up to PIN_MOST and a quarter of the `available` memory."""
    document = ask([*command, str(min(PIN_MOST, available // 4)), f"{min(PINNING_S, deadline_s):g}"], deadline_s)
    if isinstance(document, NoAnswer):
        return document
    if "skipped" in document:
        return Nothing(str(document["skipped"]))
    return _typed(document, Pinned)


def _typed(document: dict[str, Any], kind: type[T]) -> T | NoAnswer:
    try:
        return msgspec.convert(document, kind, dec_hook=lambda to, value: to(value))
    except msgspec.ValidationError as error:
        return NoAnswer(f"its answer is not understood: {error}")
