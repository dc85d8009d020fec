"""The table of downloads: started, joined, paused, resumed, cancelled, remembered over a restart.

Each is a folder downloads/<id>/ with job.json (job.py) beside what has arrived (partial.py), and one task while it is
under way. What is complete is on the shelf, and forgotten here at the next start. Lives in one event loop. Does not
know HTTP handlers.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from freetoken.core.errors import DownloadNotFound, DownloadStateRefused, FreeTokenError
from freetoken.daemon import store
from freetoken.daemon.downloads.fetch import Fetcher, Limits, Source, disk_fault
from freetoken.daemon.downloads.hub import HuggingFace
from freetoken.daemon.downloads.job import MOVES, DownloadState, Record
from freetoken.daemon.downloads.order import Desk, Order
from freetoken.daemon.downloads.partial import bytes_kept
from freetoken.daemon.downloads.patience import Patience
from freetoken.daemon.downloads.placing import check_room, is_complete, publish
from freetoken.daemon.downloads.telling import Entry, Teller
from freetoken.daemon.downloads.threads import in_thread
from freetoken.daemon.downloads.web import ENDPOINT, AllowedHosts, Token, Web
from freetoken.daemon.errors import problem, unexpected
from freetoken.daemon.state import utc
from freetoken.daemon.store import Home

AT_ONCE = 2  # downloads that run; more are queued
_JOB = "job.json"
_STOP_S = 30.0  # for what is being written or moved when a download is stopped

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """From where, and how."""

    endpoint: str = ENDPOINT
    mirrors: tuple[str, ...] = ()
    patience: Patience = field(default_factory=Patience)
    limits: Limits = field(default_factory=Limits)


class Downloads:
    """All downloads of one state folder. `token` is asked at every request and kept nowhere."""

    def __init__(self, home: Home, teller: Teller, token: Token, options: Options) -> None:
        self._home, self._teller, self._options = home, teller, options
        self._web = Web(AllowedHosts(options.endpoint, options.mirrors), token, options.patience)
        self.api = HuggingFace(self._web, options.endpoint)
        self.desk = Desk(self._web, self.api)
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._table = {entry.record.id: entry for entry in self._remembered()}
        self._asked: set[asyncio.Task[Any]] = set()  # cancellations through an operation, which waits for none

    # ── what is asked ──
    async def dry_run(self, order: Order) -> dict[str, Any]:
        """What `start` would fetch, and whether there is room for it. Changes nothing."""
        record = await self.desk.record(order)
        missing = 0 if is_complete(self._target(record)) else record.bytes - bytes_kept(self._folder(record))
        free = max(0, shutil.disk_usage(self._home.root).free - self._promised())
        return {
            "id": record.id,
            "model": record.model,
            "source": record.source,
            "files": [{"name": file.local, "size": file.size} for file in record.files],
            "bytes_total": record.bytes,
            "bytes_missing": missing,
            "disk_free_bytes": free,
            "fits_disk": missing <= free,
        }

    async def start(self, order: Order) -> dict[str, Any]:
        """The download of `order`, begun, joined or resumed; completed at once where the model is already there.

        Raises whatever makes it impossible: the hub's refusal, nothing to load, no room.
        """
        record = await self.desk.record(order)
        known = self._table.get(record.id)
        entry = known if known is not None and not known.record.state.final else Entry(record)
        if is_complete(self._target(record)) and entry is not known:
            entry.record = msgspec.structs.replace(record, state=DownloadState.COMPLETED)
            entry.done = entry.verified = record.bytes
            self._table[record.id] = entry
        elif entry.task is None or not entry.record.state.active:
            self._begin(entry)
        return entry.view()

    async def pause(self, id: str) -> dict[str, Any]:
        """Stops it; what has arrived is kept. Nothing where it is paused."""
        return await self._stop(id, DownloadState.PAUSED)

    async def cancel(self, id: str) -> dict[str, Any]:
        """Stops it and deletes what has arrived. Nothing where it is cancelled."""
        return await self._stop(id, DownloadState.CANCELLED)

    def resume(self, id: str) -> dict[str, Any]:
        """Goes on where it stopped, after a failure and a restart too. Nothing where it is under way."""
        entry = self._entry(id)
        if entry.record.state.final:
            raise _refused(entry, "resumed")
        if not entry.record.state.active:
            self._begin(entry)
        return entry.view()

    def resume_interrupted(self) -> None:
        """Goes on with what the end of an earlier daemon interrupted; one that has no room stays as it is."""
        for entry in self._table.values():
            if entry.record.state is DownloadState.INTERRUPTED:
                try:
                    self._begin(entry)
                except FreeTokenError as error:
                    log.warning("the download of %s is not resumed: %s", entry.record.model, error.detail)

    def show(self, id: str) -> dict[str, Any]:
        return self._entry(id).view()

    def index(self) -> list[dict[str, Any]]:
        """All, oldest first."""
        return [entry.view() for entry in sorted(self._table.values(), key=lambda entry: entry.record.created)]

    async def close(self) -> None:
        """The daemon ends: what runs is stopped, kept, and `interrupted` for the next one."""
        await asyncio.gather(*(self._halt(entry, DownloadState.INTERRUPTED) for entry in self._table.values()))
        await self._web.close()

    # ── states ──
    def _begin(self, entry: Entry) -> None:
        """Queues it. Raises DiskFull, having changed nothing."""
        record, folder = entry.record, self._folder(entry.record)
        check_room(self._home.root, record.bytes - bytes_kept(folder), self._promised())
        self._table[record.id] = entry
        entry.begin()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._move(entry, DownloadState.QUEUED)
        entry.task = asyncio.create_task(self._run(entry), name=f"download {record.model}")
        self._teller.queued(entry, lambda: self._cancel_soon(record.id))

    async def _stop(self, id: str, wanted: DownloadState) -> dict[str, Any]:
        entry = self._entry(id)
        await self._halt(entry, wanted)
        state = entry.record.state  # the task's own end may have come first
        if state is not wanted:
            if wanted not in MOVES[state] or (entry.task and not entry.task.done()):
                raise _refused(entry, str(wanted))
            await self._settle(entry, wanted)
        return entry.view()

    async def _halt(self, entry: Entry, stop_as: DownloadState) -> None:
        """Cancels its task, which settles the state, and waits for it."""
        if entry.task is None or entry.task.done():
            return
        if entry.record.state.active:  # else it is settling already
            entry.stop_as = stop_as
            entry.task.cancel()
        await asyncio.wait({entry.task}, timeout=_STOP_S)

    async def _run(self, entry: Entry) -> None:
        """The task of one download: to its end, whichever that is."""
        try:
            async with self._slots:
                self._move(entry, DownloadState.RUNNING)
                self._teller.event(entry, "started")
                await self._bring(entry)
            await self._settle(entry, DownloadState.COMPLETED)
        except asyncio.CancelledError:  # by _halt alone, which waits for what follows
            there = is_complete(self._target(entry.record))
            await self._settle(entry, DownloadState.COMPLETED if there else entry.stop_as)
        except FreeTokenError as error:
            await self._settle(entry, DownloadState.FAILED, error)
        except OSError as error:
            await self._settle(entry, DownloadState.FAILED, disk_fault(error, self._home.root))
        except Exception as error:  # a fault of ours must end as a state that can be seen
            log.exception("the download of %s failed", entry.record.model)
            await self._settle(entry, DownloadState.FAILED, unexpected(error))

    async def _bring(self, entry: Entry) -> None:
        """Every file, verified, and the model on the shelf."""
        record, folder = entry.record, self._folder(entry.record)
        fetcher = Fetcher(self._web, folder, self._options.patience, self._options.limits, entry)
        telling = asyncio.create_task(self._teller.follow(entry))
        try:
            digests = await fetcher.fetch(self._sources(record))
        finally:
            telling.cancel()
        files = {file.local: {"size": file.size, "sha256": digests[file.local]} for file in record.files}
        facts = {"id": record.model, "source": record.source, "files": files, "state": "complete"}
        await in_thread(lambda: publish(folder / "files", self._target(record), facts))

    async def _settle(self, entry: Entry, state: DownloadState, error: FreeTokenError | None = None) -> None:
        """The state that it stays in: kept, told; at the end of all its folder goes."""
        body = None if error is None else problem(error)
        self._move(entry, state, body)
        if state.final:
            entry.done = entry.verified = entry.record.bytes if state is DownloadState.COMPLETED else 0
            folder = self._folder(entry.record)
            await in_thread(lambda: shutil.rmtree(folder, ignore_errors=True))
        self._teller.settled(entry, body)

    def _move(self, entry: Entry, state: DownloadState, error: Mapping[str, Any] | None = None) -> None:
        if state is not entry.record.state:  # a new one is queued from the start
            entry.record = entry.record.moved(state, utc(time.time()), error)
        try:
            store.write_json(self._folder(entry.record) / _JOB, msgspec.to_builtins(entry.record))
        except OSError as fault:  # a full disk must not end what is only being noted: the state before it is read then
            log.warning("%s of %s could not be written: %s", _JOB, entry.record.model, fault)

    def _cancel_soon(self, id: str) -> None:
        """For POST /operations/{id}/cancel, which asks and does not wait."""
        task = asyncio.ensure_future(self.cancel(id))
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    # ── where things are ──
    def _remembered(self) -> Iterator[Entry]:
        """What an earlier process left; what it had only to tidy up is tidied up."""
        for path in sorted(self._home.root.glob(f"downloads/dl_*/{_JOB}")):
            try:
                record = msgspec.convert(store.read_json(path), Record)
            except msgspec.ValidationError as error:
                log.warning("%s is not readable: %s", path, error)
                continue
            if record.state.final or is_complete(self._target(record)):
                shutil.rmtree(path.parent, ignore_errors=True)
            elif path.parent.name == record.id:
                if record.state.active:
                    record = record.moved(DownloadState.INTERRUPTED, record.updated)
                yield Entry(record, done=bytes_kept(path.parent))

    def _entry(self, id: str) -> Entry:
        try:
            return self._table[id]
        except KeyError:
            raise DownloadNotFound(f"There is no download {id[:40]!r}.", fixes=("ft pull MODEL",)) from None

    def _folder(self, record: Record) -> Path:
        return self._home.root / "downloads" / record.id

    def _target(self, record: Record) -> Path:
        return self._home.models / record.folder

    def _promised(self) -> int:
        """Bytes that downloads under way will still write."""
        return sum(entry.record.bytes - entry.done for entry in self._table.values() if entry.record.state.active)

    def _sources(self, record: Record) -> list[Source]:
        origin = record.repo or record.url or ""
        return [
            Source(
                url=record.url or self.api.url(origin, record.commit, file.remote),
                file=file.announced,
                local=file.local,
                origin=origin,
                revision=record.commit,
            )
            for file in record.files
        ]


def _refused(entry: Entry, wanted: str) -> DownloadStateRefused:
    return DownloadStateRefused(f"The download of {entry.record.model} is {entry.record.state}, it cannot be {wanted}.")
