"""What is told of a download: the API's view of it, its events, its operation.

A download has one Operation from its first start to its end; a pause is a phase of it. Does not know how downloads
go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from freetoken.daemon.downloads.job import DownloadState, Record
from freetoken.daemon.downloads.patience import Pace
from freetoken.daemon.events import Hub
from freetoken.daemon.operations import Operations
from freetoken.daemon.state import OperationState, Progress

EVERY_S = 0.25  # at most four times a second
_STALLED_MS = 1000  # from then on silence is told too
_ENDS = {
    DownloadState.COMPLETED: OperationState.SUCCEEDED,
    DownloadState.CANCELLED: OperationState.CANCELLED,
    DownloadState.FAILED: OperationState.FAILED,
    DownloadState.INTERRUPTED: OperationState.INTERRUPTED,
}


@dataclass(slots=True)
class Entry:
    """A download and what this process knows of it. It is the Report of its Fetcher."""

    record: Record
    done: int = 0  # bytes there
    verified: int = 0  # bytes found right
    pace: Pace = field(default_factory=lambda: Pace(time.monotonic()))
    operation: str | None = None
    task: asyncio.Task[None] | None = None
    stop_as: DownloadState = DownloadState.INTERRUPTED  # what it means when its task is cancelled

    def begin(self) -> None:
        """Nothing is known of what is there until its files are opened."""
        self.done, self.verified, self.pace = 0, 0, Pace(time.monotonic())

    def arrived(self, count: int) -> None:
        self.done += count
        self.pace.add(count, time.monotonic())

    def kept(self, count: int) -> None:
        self.done += count

    def hashed(self, count: int) -> None:
        self.verified += count
        self.pace.alive(time.monotonic())

    @property
    def phase(self) -> str:
        if self.record.state is not DownloadState.RUNNING:
            return str(self.record.state)
        return "verify" if self.done == self.record.bytes else "download"

    def view(self) -> dict[str, Any]:
        """As the API shows it; unknown is null."""
        record, now = self.record, time.monotonic()
        running = record.state is DownloadState.RUNNING
        return {
            "id": record.id,
            "model": record.model,
            "source": record.source,
            "state": str(record.state),
            "phase": self.phase,
            "operation": self.operation,
            "files": len(record.files),
            "bytes_total": record.bytes,
            "bytes_done": self.done,
            "bytes_verified": self.verified,
            "bytes_per_s": self.pace.bytes_per_s(now) if running else None,
            "eta_ms": self.pace.eta_ms(record.bytes - self.done, now) if running else None,
            "stalled_ms": self.pace.stalled_ms(now) if running else None,
            "error": record.error,
            "created": record.created,
            "updated": record.updated,
        }


class Teller:
    """Tells the event stream and the table of operations."""

    def __init__(self, hub: Hub, operations: Operations) -> None:
        self._hub, self._operations = hub, operations

    def queued(self, entry: Entry, cancel: Callable[[], None]) -> None:
        """It waits for its turn, for the first time or again."""
        if entry.operation is None:
            entry.operation = self._operations.begin("download", entry.record.model, cancel).id
        self._operations.advance(entry.operation, "queued")
        self.event(entry, "queued")

    def settled(self, entry: Entry, error: Mapping[str, Any] | None) -> None:
        """It is in a state that it stays in."""
        state, operation = entry.record.state, entry.operation
        self.event(entry, str(state))
        if operation is None:
            return
        if state is DownloadState.PAUSED:
            self._operations.advance(operation, "paused")
        else:
            self._operations.finish(operation, _ENDS[state], None if error is None else dict(error))
            entry.operation = None

    async def follow(self, entry: Entry) -> None:
        """Tells the progress of a running download until it is cancelled."""
        told: tuple[int, int] | None = None
        while True:
            now = (entry.done, entry.verified)
            if now != told or entry.pace.stalled_ms(time.monotonic()) >= _STALLED_MS:
                told = now
                self._progress(entry)
            await asyncio.sleep(EVERY_S)

    def event(self, entry: Entry, what: str) -> None:
        data = entry.view()
        self._hub.publish(f"download.{what}", data, subject=data["id"], corr=entry.operation, source="downloads")

    def _progress(self, entry: Entry) -> None:
        self.event(entry, "progress")
        if entry.operation is not None:
            done = entry.verified if entry.phase == "verify" else entry.done
            self._operations.advance(entry.operation, entry.phase, Progress(done, entry.record.bytes, "bytes"))
