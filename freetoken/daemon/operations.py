"""Operations: work that outlives the call that asked for it, with its state, phase, progress and error.

Kept in operations.json so that a restarted daemon can say what became of them: one that ran when the daemon ended is
`interrupted`. Does not know what the work is; whoever does it reports here. Lives in one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from freetoken.core.errors import OperationNotFound
from freetoken.daemon import store
from freetoken.daemon.events import Hub
from freetoken.daemon.state import Operation, OperationState, Progress, utc

KEPT = 100  # finished operations remembered

log = logging.getLogger(__name__)


class Operations:
    """The table of operations, newest last."""

    def __init__(self, path: Path, hub: Hub) -> None:
        self._path = path
        self._hub = hub
        self._table = {op.id: op for op in _read(path)}
        self._done: dict[str, asyncio.Event] = {}
        self._cancel: dict[str, Callable[[], None]] = {}
        self._phase_began: dict[str, float] = {}

    def begin(self, kind: str, subject: str | None, cancel: Callable[[], None]) -> Operation:
        """A running operation; `cancel` asks its work to end and returns at once."""
        now = utc(time.time())
        operation = Operation(f"op_{secrets.token_hex(8)}", kind, subject, OperationState.RUNNING, now, now)
        self._done[operation.id] = asyncio.Event()
        self._cancel[operation.id] = cancel
        self._table[operation.id] = operation
        self._publish(operation)
        self._save()
        return operation

    def advance(self, id: str, phase: str, progress: Progress | None = None) -> None:
        """A phase began, or went on. The time left is estimated from the pace of the phase so far."""
        operation = self.get(id)
        now = time.monotonic()
        new = phase != operation.phase
        if new:
            self._phase_began[id] = now
        eta_ms = _eta_ms(progress, now - self._phase_began[id])
        changed = replace(operation, phase=phase, progress=progress, eta_ms=eta_ms, updated=utc(time.time()))
        self._table[id] = changed
        self._publish(changed, progress=not new)

    def finish(self, id: str, state: OperationState, error: dict[str, Any] | None = None) -> None:
        """The last word: `error` is a problem for `failed`."""
        operation = self.get(id)
        changed = replace(operation, state=state, error=error, eta_ms=None, updated=utc(time.time()))
        self._table[id] = changed
        for table in (self._cancel, self._phase_began):
            table.pop(id, None)
        self._forget_old()
        self._publish(changed)
        self._save()
        self._done.pop(id).set()

    def cancel(self, id: str) -> Operation:
        """Asks the work to end. Nothing where it already has."""
        operation = self.get(id)
        if not operation.state.done and id in self._cancel:
            self._cancel[id]()
        return operation

    async def wait(self, id: str, timeout_s: float) -> Operation:
        """The operation once it is done, or as it is after `timeout_s`."""
        self.get(id)
        done = self._done.get(id)
        if done is not None and timeout_s > 0:
            with contextlib.suppress(TimeoutError):  # "as it is" is the answer then
                await asyncio.wait_for(done.wait(), timeout_s)
        return self.get(id)

    def get(self, id: str) -> Operation:
        try:
            return self._table[id]
        except KeyError:
            raise OperationNotFound(f"There is no operation {id[:40]!r}.") from None

    def recent(self, count: int = 20) -> list[Operation]:
        """The newest, running ones included, oldest first."""
        return list(self._table.values())[-count:]

    def _publish(self, operation: Operation, *, progress: bool = False) -> None:
        data = msgspec.to_builtins(operation)
        self._hub.publish("operation.updated", data, subject=operation.id, corr=operation.id, progress=progress)

    def _save(self) -> None:
        try:
            store.write_json(self._path, [msgspec.to_builtins(operation) for operation in self._table.values()])
        except OSError as error:  # a full disk must not end the work that is only being noted
            log.warning("operations.json could not be written: %s", error)

    def _forget_old(self) -> None:
        finished = [id for id, operation in self._table.items() if operation.state.done]
        for id in finished[:-KEPT]:
            del self._table[id]


def _read(path: Path) -> list[Operation]:
    try:
        operations = msgspec.convert(store.read_json(path) or [], list[Operation])
    except msgspec.ValidationError as error:  # another version's file: its operations mean nothing here
        log.warning("operations.json is not readable and is begun anew: %s", error)
        return []
    return [op if op.state.done else replace(op, state=OperationState.INTERRUPTED) for op in operations]


def _eta_ms(progress: Progress | None, elapsed_s: float) -> int | None:
    if progress is None or progress.total <= 0 or not 0 < progress.done <= progress.total:
        return None
    return round(1000 * elapsed_s * (progress.total - progress.done) / progress.done)
