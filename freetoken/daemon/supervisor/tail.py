"""Follows the file that an engine process writes its output to.

A file and not a pipe: an engine that outlives its daemon goes on writing, and the next daemon reads on. The file is
raw, of bounded size and gone with the process; what is kept goes through logs.py. A process that floods it costs
neither the disk nor the daemon: beyond so many lines a second they are counted and dropped. Does not know processes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from freetoken.daemon.supervisor.logs import EngineLog

POLL_S = 0.1
SLICE = 1 << 14  # bytes read at once: the event loop has other work
LONGEST = 1 << 16  # bytes of a line; the rest follows as another one
FILE = 4 << 20  # bytes; beyond, what was read is removed
A_SECOND = 1000  # lines
LAST = 1 << 16  # bytes read of a file that was written while nobody read it, and at the end


@dataclass(frozen=True, slots=True)
class Output:
    """Where the lines go."""

    log: EngineLog
    on_line: Callable[[str], None]
    on_dropped: Callable[[int], None]  # so many lines were neither kept nor told


def create(path: Path) -> int:
    """An empty file for this user only, open for a child to append to: a file descriptor. Raises OSError."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


class Tail:
    """Reads `path` from now on, and from a little before where it was there already."""

    def __init__(self, path: Path, output: Output) -> None:
        self._file = path.open("r+b", buffering=0)
        self._output = output
        self._rest = b""
        self._second, self._lines = 0.0, 0  # lines of the running second
        self._dropped = 0
        self._skip()
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Pass on what is left, then stop; once. Later writes stay in the file."""
        if self._file.closed:
            return
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        self._skip()
        self._second = 0.0
        while self._read():
            await asyncio.sleep(0)
        if self._rest:
            self._pass_on(self._rest)
        self._tell_dropped()
        self._file.close()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(0 if self._read() else POLL_S)

    def _read(self) -> bool:
        """Whether there was something."""
        self._keep_small()
        chunk = self._file.read(SLICE)
        if not chunk:
            if time.monotonic() - self._second >= 1.0:
                self._tell_dropped()
            return False
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._pass_on(line)
        return True

    def _pass_on(self, line: bytes) -> None:
        now = time.monotonic()
        if now - self._second >= 1.0:
            self._tell_dropped()
            self._second, self._lines = now, 0
        self._lines += 1
        if self._lines > A_SECOND:
            self._dropped += 1
        else:
            self._output.on_line(self._output.log.add(line))

    def _tell_dropped(self) -> None:
        if self._dropped:
            self._output.on_dropped(self._dropped)
            self._dropped = 0

    def _skip(self) -> None:
        """Leave out what nobody could read any more."""
        size = os.fstat(self._file.fileno()).st_size
        if size - self._file.tell() > LAST:
            self._file.seek(size - LAST)
            self._rest = b""

    def _keep_small(self) -> None:
        size, read = os.fstat(self._file.fileno()).st_size, self._file.tell()
        if read > FILE or size - read > FILE:
            self._dropped += size > read  # how many lines they were is not known
            self._rest = b""
            self._file.truncate(0)
            self._file.seek(0)
