"""How long to wait for a server, and how often: back-off with jitter, Retry-After, the pace of what arrives. Pure.

Does not know sockets; time is given, never asked for.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime

_WINDOW_S = 10.0  # over which the pace is measured


@dataclass(frozen=True, slots=True)
class Patience:
    """The waits of one download. `attempts` are those in a row that brought no byte."""

    attempts: int = 8
    first_s: float = 1.0
    longest_s: float = 30.0
    connect_s: float = 15.0
    stall_s: float = 30.0  # silence on a connection after which it is given up
    longest_retry_after_s: float = 300.0  # a server that wants more than this is not waited for

    def wait_s(self, failures: int, retry_after_s: float | None = None) -> float | None:
        """What to wait after that many failures in a row (1: the first); None: give up."""
        if failures >= self.attempts or (retry_after_s or 0.0) > self.longest_retry_after_s:
            return None
        backoff: float = min(self.longest_s, self.first_s * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0)
        return max(backoff, retry_after_s or 0.0)


def retry_after_s(header: str | None, now: float) -> float | None:
    """Retry-After (RFC 9110, section 10.2.3): seconds or a date; None where it is neither. `now` in unix seconds."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header[:9])
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now)


class Pace:
    """Bytes over the last seconds: speed, time left, and how long nothing has come. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._marks: deque[tuple[float, int]] = deque([(now, 0)])
        self._total = 0
        self._moved = now

    def add(self, count: int, now: float) -> None:
        """`count` bytes arrived; less than 0 where some had to be thrown away."""
        self._total += count
        self._moved = now if count > 0 else self._moved
        if now - self._marks[-1][0] < 0.1:  # a mark for each chunk would be thousands
            self._marks[-1] = (self._marks[-1][0], self._total)
        else:
            self._marks.append((now, self._total))
        while len(self._marks) > 2 and now - self._marks[1][0] > _WINDOW_S:
            self._marks.popleft()

    def alive(self, now: float) -> None:
        """Something went on that brings no bytes."""
        self._moved = now

    def bytes_per_s(self, now: float) -> int:
        began, count = self._marks[0]
        return max(0, round((self._total - count) / max(now - began, 0.1)))

    def eta_ms(self, missing: int, now: float) -> int | None:
        """None where nothing moves."""
        speed = self.bytes_per_s(now)
        return round(1000 * missing / speed) if speed else None

    def stalled_ms(self, now: float) -> int:
        return round(1000 * (now - self._moved))
