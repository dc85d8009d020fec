"""The engine process: started without a shell, listened to, ended with a deadline, its death explained.

Does not know models or the order of a load (actor.py), nor the messages (wire/).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from freetoken.core.errors import EngineError, EngineStartFailed
from freetoken.core.units import Bytes
from freetoken.daemon import native
from freetoken.daemon.supervisor.autopsy import LAST_LINES, Death, explain
from freetoken.daemon.supervisor.logs import EngineLog
from freetoken.settings.load import child_environment
from freetoken.wire import channel
from freetoken.wire.remote import RemoteEngine
from freetoken.wire.rendezvous import Rendezvous

CONNECT_S = 60.0  # from the start of the process to its hello; a cold disk reads an interpreter slowly
TERM_S = 3.0  # from SIGTERM to SIGKILL
REAP_S = 2.0  # from SIGKILL to the exit code
LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Output:
    """Where the lines of the process go."""

    log: EngineLog
    on_line: Callable[[str], None]


class EngineProcess:
    """One engine process of ours, from its start to its exit code."""

    def __init__(self, process: asyncio.subprocess.Process, meeting: tuple[Rendezvous, Path], output: Output) -> None:
        self.pid = process.pid
        self.ending = False  # whether we asked it to end
        self._process = process
        self._where, self._record = meeting
        self._output = output
        self._oom_kills_before = native.kernel_oom_kills() or 0
        self._least_free = _free()
        self._reading = asyncio.create_task(self._read_output())

    @classmethod
    async def spawn(
        cls, command: tuple[str, ...], record: Path, output: Output, orphan_grace_s: float
    ) -> EngineProcess:
        """Start `command --runtime RECORD`. The secret is in that file (0600), not in arguments or environment.

        Raises EngineStartFailed when the program cannot be started.
        """
        where = Rendezvous.new(orphan_grace_s)
        where.write(record)
        output.log.clear()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                "--runtime",
                str(record),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=LINE_BYTES,
                env=child_environment(),
                **native.own_group(),
            )
        except OSError as error:
            channel.remove(where.socket)
            raise EngineStartFailed(f"The engine program could not be started: {error.strerror}.") from error
        return cls(process, (where, record), output)

    async def connect(self) -> RemoteEngine:
        """The connection, as soon as it listens. Raises EngineError with the reason if it ends before."""
        connecting = asyncio.create_task(RemoteEngine.connect(self._where, CONNECT_S))
        ending = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({connecting, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise await self.autopsy(loading=True)
            return connecting.result()
        finally:
            ending.cancel()
            if not connecting.done():
                connecting.cancel()

    def look_at_memory(self) -> None:
        """Called once a second, so that a sudden death can be told from a lack of memory."""
        self._least_free = _free()

    async def end(self, remote: RemoteEngine | None, grace_s: float) -> None:
        """Ask it to end, then SIGTERM, then SIGKILL. Returns when it is gone; at most grace_s + TERM_S + REAP_S."""
        self.ending = True
        if remote is not None:
            await remote.shutdown(grace_s)
        await self._leave(grace_s if remote is not None else 0.0)
        await self._tidy()

    async def autopsy(self, *, loading: bool) -> EngineError:
        """Why it ended. One that lost its connection but still runs has stopped answering: it is killed."""
        exit_code = await self._exit_code(REAP_S)
        if exit_code is None:
            native.end_group(self.pid, force=True)
            await self._exit_code(REAP_S)
        await self._tidy()
        return explain(self.death(exit_code, loading=loading))

    def death(self, exit_code: int | None, *, loading: bool) -> Death:
        return Death(
            exit_code=exit_code,
            signal=native.signal_name(exit_code) if exit_code is not None else None,
            last_lines=tuple(self._output.log.last(LAST_LINES)),
            loading=loading,
            kernel_oom_kills=(native.kernel_oom_kills() or 0) - self._oom_kills_before,
            least_free=self._least_free,
            total=Bytes(psutil.virtual_memory().total),
        )

    async def _leave(self, grace_s: float) -> None:
        if await self._exit_code(grace_s) is None:
            native.end_group(self.pid, force=False)
            if await self._exit_code(TERM_S) is None:
                native.end_group(self.pid, force=True)
                await self._exit_code(REAP_S)

    async def _exit_code(self, within_s: float) -> int | None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), within_s)
        return self._process.returncode

    async def _tidy(self) -> None:
        """The rest of its output is read, and what a killed process leaves behind is removed."""
        await asyncio.wait({self._reading}, timeout=1.0)
        self._reading.cancel()
        channel.remove(self._where.socket)
        self._record.unlink(missing_ok=True)

    async def _read_output(self) -> None:
        stream = self._process.stdout
        if stream is None:
            return
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than LINE_BYTES: what was read of it is dropped, the rest follows as lines
                continue
            if not line:
                return
            self._output.on_line(self._output.log.add(line))


def _free() -> Bytes:
    return Bytes(psutil.virtual_memory().available)
