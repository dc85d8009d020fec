"""Brings files into a download's folder: parts side by side, over cuts, stalls and restarts, verified at the end.

What is there is never fetched twice unless it turns out wrong: a server that answers a Range with the whole file, or
with another ETag, restarts that file; a wrong digest drops that file and tries it once more. Tries are bounded by
Patience, which counts those that bring nothing. Does not know jobs; one Fetcher for one folder at a time.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import shutil
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from freetoken.core.errors import (
    DiskFull,
    DownloadFailed,
    DownloadStalled,
    FileChanged,
    FreeTokenError,
    HashMismatch,
    HubUnavailable,
)
from freetoken.core.units import Bytes
from freetoken.daemon.downloads.choose import RepoFile
from freetoken.daemon.downloads.hub import explain, unreachable
from freetoken.daemon.downloads.partial import PART_BYTES, Partial, Writer
from freetoken.daemon.downloads.patience import Patience
from freetoken.daemon.downloads.threads import in_thread, together
from freetoken.daemon.downloads.verify import Verdict, verify
from freetoken.daemon.downloads.web import Answer, Web

_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19}|\*)")
_FLUSH_S = 0.2  # longest time that what has come waits for more
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_EXPIRED = frozenset({401, 403, 404, 410})  # of a CDN: the address was signed for a while, the hub gives a new one

log = logging.getLogger(__name__)


class Report(Protocol):
    """Who watches. All calls come from the event loop."""

    def kept(self, count: int) -> None:
        """Bytes were there from an earlier time."""

    def arrived(self, count: int) -> None:
        """Bytes were written; less than 0: had to be thrown away."""

    def hashed(self, count: int) -> None:
        """Bytes were verified; less than 0: were found wrong."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file to bring: where it is, what it must be, and its name in the folder."""

    url: str
    file: RepoFile
    local: str
    origin: str  # the repository, or the host, that errors name
    revision: str


@dataclass(frozen=True, slots=True)
class Limits:
    """How much at once, how often."""

    connections: int = 8
    files: int = 4
    part_bytes: int = PART_BYTES
    chunk_bytes: int = 1 << 20
    journal_s: float = 1.0


class RangeRefused(Exception):
    """The server has only the whole file to give: what is there of it is of no use."""


class Fetcher:
    """Fills `folder`. `fetch` may be cancelled at any await: what has arrived is kept."""

    def __init__(self, web: Web, folder: Path, patience: Patience, limits: Limits, report: Report) -> None:
        self._web, self._folder, self._patience, self._limits, self._report = web, folder, patience, limits, report
        self._connections = asyncio.Semaphore(limits.connections)
        self._files = asyncio.Semaphore(limits.files)

    async def fetch(self, sources: Sequence[Source]) -> dict[str, str]:
        """Every file under files/ with the content announced; SHA-256 by local name.

        Raises a DownloadFailed, or DownloadHostRefused.
        """
        found: dict[str, str] = {}

        async def one(source: Source) -> None:
            async with self._files:
                found[source.local] = await self._file(source)

        try:
            await together(one(source) for source in sources)
        except OSError as error:
            raise disk_fault(error, self._folder) from error
        return found

    # ── one file ──
    async def _file(self, source: Source) -> str:
        """Its SHA-256, once it is under files/."""
        part_bytes = self._limits.part_bytes
        partial = await in_thread(lambda: Partial(self._folder, source.local, source.file.size, part_bytes))
        self._report.kept(partial.have)
        if partial.sha256 is not None:
            self._report.hashed(partial.size)
        sha256 = partial.sha256 or await self._arrival(partial, source)
        await in_thread(lambda: partial.accept(sha256))
        return sha256

    async def _arrival(self, partial: Partial, source: Source) -> str:
        """Its SHA-256, once all of it is there and right. Raises HashMismatch when it was wrong twice."""
        found = ""
        for _ in range(2):
            await self._fill(partial, source)
            verdict = await self._verdict(partial, source)
            found = verdict.sha256
            if verdict.right:
                return found
            log.warning("%s arrived with the wrong content (SHA-256 %s)", source.local, found)
            self._report.hashed(-partial.size)
            self._report.arrived(-partial.restart())
        expected = source.file.sha256 or source.file.blob_id or "none"
        raise HashMismatch(
            f"{source.local} arrived twice with the wrong content: SHA-256 {found[:16]}…, expected {expected[:16]}…; "
            "a proxy, a cache or a mirror between here and the hub changes it.",
            fixes=("try another network, or without the proxy", "set HF_ENDPOINT to another mirror, or to none"),
        )

    async def _verdict(self, partial: Partial, source: Source) -> Verdict:
        stop, loop = threading.Event(), asyncio.get_running_loop()

        def hashed(count: int) -> None:
            loop.call_soon_threadsafe(self._report.hashed, count)

        return await in_thread(lambda: verify(partial.path, source.file, stop, hashed), stop.set)

    async def _fill(self, partial: Partial, source: Source) -> None:
        """Every byte of it, from as many connections as there are parts; from one where the server knows no ranges."""
        restarts = 0
        async with self._journalled(partial):
            while pending := partial.pending():
                indices = iter(pending)
                try:
                    await together(self._parts(partial, source, indices) for _ in range(self._limits.connections))
                except RangeRefused:
                    restarts += 1
                    if restarts >= self._patience.attempts:
                        raise HubUnavailable(
                            f"the server of {source.local} gives only the whole file, and never to its end."
                        ) from None
                    self._report.arrived(-partial.restart(whole=True))

    @asynccontextmanager
    async def _journalled(self, partial: Partial) -> AsyncGenerator[None]:
        """While it is filled, the journal follows."""

        async def save() -> None:
            try:
                await in_thread(partial.save)
            except OSError as error:  # a full disk, which the data will say too: the journal before this one holds
                log.warning("the journal of %s is behind: %s", partial.name, error)

        async def follow() -> None:
            while True:
                await asyncio.sleep(self._limits.journal_s)
                await save()

        following = asyncio.create_task(follow())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.wait({following})
            await save()

    # ── one part ──
    async def _parts(self, partial: Partial, source: Source, indices: Iterator[int]) -> None:
        """Takes parts as long as there are any."""
        for index in indices:
            failures = 0
            while missing := partial.missing(index):
                problem = await self._try(partial, source, index)
                if problem is None:
                    break
                failures = 1 if partial.missing(index).start > missing.start else failures + 1
                wait_s = self._patience.wait_s(failures, problem.retry_after_s)
                if wait_s is None:
                    raise problem
                log.info("%s Again in %.1f s.", problem.detail, wait_s)
                await asyncio.sleep(wait_s)

    async def _try(self, partial: Partial, source: Source, index: int) -> FreeTokenError | None:
        """What a part lacks, by one request; what came in the way where another try may help, None when it is there."""
        try:
            async with self._connections, self._asked(partial, source, partial.missing(index)) as response:
                with partial.writer(index) as writer:
                    await self._pour(response, writer, len(partial.missing(index)), source.local)
        except httpx.ReadTimeout:
            silence = f"no byte of {source.local} came for {self._patience.stall_s:g} s"
            return DownloadStalled(f"{silence}, again and again.", fixes=("check the network, then resume it",))
        except httpx.TransportError as error:
            return unreachable(error, httpx.URL(source.url).host)
        except HubUnavailable as error:
            return error
        return None

    @asynccontextmanager
    async def _asked(self, partial: Partial, source: Source, missing: range) -> AsyncGenerator[httpx.Response]:
        """The answer, once it is known to hold exactly the bytes `missing`."""
        headers = {}
        if len(missing) < partial.size:
            headers["range"] = f"bytes={missing.start}-{missing.stop - 1}"
            if partial.etag is not None:
                headers["if-range"] = partial.etag
        async with self._web.open(source.url, headers) as answer:
            if answer.response.status_code not in (200, 206, 416):
                raise self._refusal(answer, source)
            check_identity(answer, source)
            check_extent(answer.response, source, missing)
            etag = answer.response.headers.get("etag", "W/")
            if partial.etag not in (None, etag):
                raise RangeRefused
            partial.etag = None if etag.startswith("W/") else etag  # a weak one says too little for If-Range
            yield answer.response

    def _refusal(self, answer: Answer, source: Source) -> FreeTokenError:
        response = answer.response
        if answer.hops and response.status_code in _EXPIRED:
            return HubUnavailable(f"{response.url.host} no longer gives {source.local} (HTTP {response.status_code}).")
        return explain(response, source.origin, source.revision, has_token=self._web.has_token)

    async def _pour(self, response: httpx.Response, writer: Writer, count: int, name: str) -> None:
        """Writes `count` bytes; what has come is written however it ends."""
        came, buffer, flushed = 0, bytearray(), time.monotonic()

        async def flush() -> None:
            nonlocal flushed
            data, flushed = bytes(buffer), time.monotonic()
            buffer.clear()
            await in_thread(lambda: writer.write(data))
            self._report.arrived(len(data))

        try:
            async for chunk in response.aiter_raw():
                buffer += chunk[: count - came]
                came += len(chunk)
                if came > count:
                    break
                if len(buffer) >= self._limits.chunk_bytes or time.monotonic() - flushed > _FLUSH_S:
                    await flush()
        finally:
            await flush()
        if came != count:
            raise HubUnavailable(f"{came} of {count} bytes of {name} came.")


def check_identity(answer: Answer, source: Source) -> None:
    """The hub names the content it sends to, or sends itself; that must be the one announced. Raises FileChanged."""
    named = answer.first.get("x-linked-etag") or ("" if answer.hops else answer.first.get("etag", ""))
    digest = named.removeprefix("W/").strip('"')
    announced = {64: source.file.sha256, 40: source.file.blob_id}.get(len(digest))
    size = answer.first.get("x-linked-size", "")
    if (announced is not None and digest != announced) or (size.isdecimal() and int(size) != source.file.size):
        raise FileChanged(f"the hub now has another content for {source.local}.", fixes=("start the download anew",))


def check_extent(response: httpx.Response, source: Source, missing: range) -> None:
    """The answer holds the bytes asked for. Raises RangeRefused, FileChanged, HubUnavailable."""
    size, status = source.file.size, response.status_code
    if status != 200:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if match and match[3] not in ("*", str(size)):
            raise FileChanged(
                f"{source.local} has {match[3]} bytes on the server, {size} were announced.",
                numbers={"expected_bytes": size, "found_bytes": int(match[3])},
                fixes=("start the download anew",),
            )
        if status == 416 or match is None or match[1] is None:
            raise RangeRefused
        if (int(match[1]), int(match[2])) != (missing.start, missing.stop - 1):
            came, wanted = int(match[2]) - int(match[1]) + 1, len(missing)
            raise HubUnavailable(
                f"another part of {source.local} came than was asked for: {came} of {wanted} bytes.",
                numbers={"expected_bytes": wanted, "found_bytes": came},
            )
    elif len(missing) < size:
        raise RangeRefused
    length = response.headers.get("content-length", "")
    if length.isdecimal() and int(length) != len(missing):
        raise HubUnavailable(
            f"the server sends {length} of {len(missing)} bytes of {source.local}.",
            numbers={"expected_bytes": len(missing), "found_bytes": int(length)},
        )


def disk_fault(error: OSError, folder: Path) -> FreeTokenError:
    """What the disk's refusal means."""
    if error.errno not in _NO_ROOM:
        return DownloadFailed(f"the download's folder cannot be written: {error.strerror}.")
    free = shutil.disk_usage(folder).free
    return DiskFull(
        f"the disk ran full: {Bytes(free)} are free; what has arrived is kept.",
        numbers={"free_bytes": free},
        fixes=("free some room, then resume the download", "delete a model that is not needed: ft models rm"),
    )
