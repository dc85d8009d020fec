"""Who waits, in which order they may start, and what they are told when they waited too long. Pure.

First come, first served, with a bounded bypass: where the first does not fit, a later one that fits may start, but at
most MOST_OVERTAKES may overtake the same request; then the queue waits for it. Nobody overtakes one that was
preempted: it holds the head, and its place among those that run is the next that is free. Does not know pools.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from freetoken.core.errors import QueueFull, QueueTimeout
from freetoken.engine.step import Request

MOST_OVERTAKES = 8
RETRY_AFTER_S = 5.0


class WaitingQueue:
    def __init__(self) -> None:
        self.changes = 0  # grows with everybody who comes or goes
        self._waiting: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """In order; a copy, so that requests may come and go meanwhile."""
        return iter(tuple(self._waiting))

    def push(self, request: Request) -> None:
        self._waiting.append(request)
        self.changes += 1

    def put_back(self, request: Request, deadline_s: float) -> None:
        """`request` was preempted: it comes before all others, and may wait until `deadline_s`."""
        request.preempted, request.deadline_s = True, deadline_s
        self._waiting.appendleft(request)
        self.changes += 1

    def remove(self, request: Request) -> None:
        """Where it is not there, nothing happens."""
        if request in self._waiting:
            self._waiting.remove(request)
            self.changes += 1

    def candidates(self) -> Iterator[Request]:
        """Who may start, in order. The one that was given last has not started if it is still here for the next."""
        refused: list[Request] = []
        for request in self:
            if len(refused) > MOST_OVERTAKES or any(_is_due(other) for other in refused):
                return
            yield request
            if request in self._waiting:
                refused.append(request)

    def start(self, request: Request) -> None:
        """`request` runs now: it leaves the queue, past all that are before it."""
        for other in self:
            if other is request:
                break
            other.overtaken += 1
        self.remove(request)

    def check_room(self, most: int, about_to_run: int) -> None:
        """Raises QueueFull where `most` wait already. Requests that the next step can admit do not count."""
        if len(self) >= most + about_to_run:
            raise QueueFull(
                f"{len(self)} requests are waiting already (the limit is {most}): try again later, or load the model "
                "with a larger --max-running-requests.",
                numbers={"queued": len(self), "max_queued": most},
                retry_after_s=RETRY_AFTER_S,
            )

    def timeout(self, request: Request, now_s: float, reason: str, numbers: dict[str, int]) -> QueueTimeout:
        """What one is told who waited past its deadline; `reason` is what it waited for, with `numbers`."""
        waited_s, place = now_s - request.arrived_s, self._waiting.index(request) + 1
        return QueueTimeout(
            f"The request waited {waited_s:.0f} s at position {place} of {len(self)} in the queue: {reason}. Try again "
            "later, or load the model with a larger --max-running-requests or --num-tokens.",
            numbers={"waited_s": round(waited_s, 3), "position": place, **numbers},
            retry_after_s=RETRY_AFTER_S,
        )


def _is_due(request: Request) -> bool:
    """Nobody behind it may start before it."""
    return request.preempted or request.overtaken >= MOST_OVERTAKES
