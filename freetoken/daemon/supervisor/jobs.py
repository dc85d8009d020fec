"""One piece of lifecycle work at a time, as an operation that can be followed and cancelled.

Does not know what the work is. Lives in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from freetoken.core.errors import FreeTokenError, LifecycleBusy
from freetoken.daemon.errors import problem, unexpected
from freetoken.daemon.operations import Operations
from freetoken.daemon.state import Operation, OperationState

log = logging.getLogger(__name__)


class Jobs:
    """`at_end` is called when the work is over and before its operation says so."""

    def __init__(self, operations: Operations, at_end: Callable[[], None]) -> None:
        self.cancel_asked = False  # of the work that runs
        self.sheltered = False  # the work must not be cut short now: it looks at `cancel_asked` itself
        self._operations, self._at_end = operations, at_end
        self._task: asyncio.Task[None] | None = None
        self._running: Operation | None = None

    @property
    def running(self) -> Operation | None:
        """The operation of the work that runs."""
        return self._running

    def begin(self, kind: str, subject: str, work: Callable[[str], Awaitable[None]]) -> Operation:
        """Start `work`, which is given the operation's id. Raises LifecycleBusy."""
        self.check_free()
        self.cancel_asked = False
        operation = self._running = self._operations.begin(kind, subject, self._cancel)
        self._task = asyncio.create_task(self._work(operation.id, work))
        return operation

    def check_free(self) -> None:
        """Raises LifecycleBusy, which names the operation that runs."""
        operation = self._running
        if operation is not None:
            raise LifecycleBusy(
                f"A {operation.kind} of {operation.subject} is running (operation {operation.id}).",
                numbers={"operation": operation.id},
                fixes=("Wait for it", f"Cancel it: POST /api/v1/operations/{operation.id}/cancel"),
            )

    async def settled(self, timeout_s: float) -> bool:
        """Waits until no work runs. False where `timeout_s` passed before."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout_s)
        return self._running is None

    async def close(self) -> None:
        """Cancel what runs and wait for its end; it has its own deadlines."""
        if self._task is not None:
            self._cancel()
            await asyncio.wait({self._task})

    def _cancel(self) -> None:
        """Ends the work, once; while it is sheltered, as soon as it looks."""
        if self.cancel_asked or self._task is None:
            return
        self.cancel_asked = True
        if not self.sheltered:
            self._task.cancel()

    async def _work(self, id: str, work: Callable[[str], Awaitable[None]]) -> None:
        """Runs the work to its end and closes its operation, however it ends."""
        outcome: tuple[OperationState, dict[str, Any] | None] = (OperationState.SUCCEEDED, None)
        try:
            await work(id)
        except asyncio.CancelledError:
            outcome = (OperationState.CANCELLED, None)
        except Exception as error:  # noqa: BLE001 - whatever it is, the operation carries it to whoever asked
            outcome = (OperationState.FAILED, problem(known(error)))
        finally:
            self._running = None
            self._at_end()
            self._operations.finish(id, *outcome)


def known(error: Exception) -> FreeTokenError:
    """`error` itself if it is of our tree; else it is logged and hidden."""
    if isinstance(error, FreeTokenError):
        return error
    log.error("lifecycle work failed", exc_info=error)
    return unexpected(error)
