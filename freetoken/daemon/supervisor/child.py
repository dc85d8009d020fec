"""The engine process: started without a shell or taken over, listened to, ended with a deadline, its death explained.

A process that an earlier daemon started is known by pid and start time, and is signalled only while both still hold;
its exit code nobody can know. Does not know models or the order of a load (launch.py), nor the messages (wire/).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from freetoken.client.discovery import process_is
from freetoken.core.errors import EngineError, EngineStartFailed
from freetoken.core.units import Bytes
from freetoken.daemon import native
from freetoken.daemon.supervisor import tail
from freetoken.daemon.supervisor.autopsy import LAST_LINES, Death, explain
from freetoken.daemon.supervisor.tail import Output, Tail
from freetoken.settings.load import child_environment
from freetoken.wire import channel
from freetoken.wire.remote import RemoteEngine
from freetoken.wire.rendezvous import Rendezvous

CONNECT_S = 60.0  # from the start of the process to its hello; a cold disk reads an interpreter slowly
TERM_S = 3.0  # from SIGTERM to SIGKILL
REAP_S = 2.0  # from SIGKILL to the exit code
DUMP_S = 0.5  # from the signal to the last line of a stack dump
LOOK_S = 0.01


class Body(Protocol):
    """A process, as far as one can know it."""

    @property
    def pid(self) -> int: ...
    @property
    def exit_code(self) -> int | None:
        """Negative: the signal; None while it runs, and for ever where it is not our child."""
        ...

    @property
    def gone(self) -> bool: ...


class Child:
    """A process that we started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    @property
    def gone(self) -> bool:
        return self.exit_code is not None


@dataclass(frozen=True, slots=True)
class Stranger:
    """A process that an earlier daemon started."""

    pid: int
    start_time: float  # unix seconds
    exit_code: None = None

    @property
    def gone(self) -> bool:
        return not process_is(self.pid, self.start_time)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where daemon and engine meet."""

    where: Rendezvous
    record: Path  # runtime/engine.json

    @property
    def output(self) -> Path:
        """What the process prints, raw."""
        return self.record.with_suffix(".out")

    def clear(self) -> None:
        """Remove what an engine that is gone has left, unless another one has written its own record there."""
        channel.remove(self.where.socket)
        now = Rendezvous.find(self.record)
        if now is None or now.instance_id == self.where.instance_id:
            self.record.unlink(missing_ok=True)
            self.output.unlink(missing_ok=True)


class EngineProcess:
    """One engine process, from its start (or its adoption) to its end."""

    def __init__(self, body: Body, meeting: Meeting, output: Output) -> None:
        self.pid = body.pid
        self.ending = False  # whether we asked it to end
        self.hung: str | None = None  # why we ended it without asking
        self._body, self._meeting, self._output = body, meeting, output
        self._oom_kills_before = native.kernel_oom_kills() or 0
        self._least_free = _free()
        self._tail = Tail(meeting.output, output)

    @classmethod
    def spawn(cls, command: tuple[str, ...], record: Path, output: Output, orphan_grace_s: float) -> EngineProcess:
        """Start `command --runtime RECORD`. The secret is in that file (0600), not in arguments or environment.

        Raises EngineStartFailed when the program cannot be started.
        """
        meeting = Meeting(Rendezvous.new(orphan_grace_s), record)
        try:
            meeting.where.write(record)
            output.log.clear()
            process = _start([*command, "--runtime", str(record)], meeting.output)
        except OSError as error:
            meeting.clear()
            raise EngineStartFailed(f"The engine program could not be started: {error.strerror}.") from error
        _sign(meeting, process.pid)
        return cls(Child(process), meeting, output)

    @classmethod
    def adopt(cls, meeting: Meeting, output: Output) -> EngineProcess | None:
        """The process that the record names; None where it is gone (its pid may be a stranger's by now)."""
        where = meeting.where
        if where.pid is None or where.start_time is None:
            return None
        body = Stranger(where.pid, where.start_time)
        if body.gone:
            return None
        meeting.output.touch(mode=0o600)
        return cls(body, meeting, output)

    @property
    def instance_id(self) -> str:
        """Of the engine, new with each process."""
        return self._meeting.where.instance_id

    async def connect(self, within_s: float = CONNECT_S) -> RemoteEngine:
        """The connection, as soon as it listens. Raises EngineError with the reason if it ends before."""
        connecting = asyncio.create_task(RemoteEngine.connect(self._meeting.where, within_s))
        try:
            while not connecting.done():
                await asyncio.wait({connecting}, timeout=LOOK_S)
                if self._body.gone and not connecting.done():
                    raise await self.autopsy(loading=True)
            return connecting.result()
        finally:
            connecting.cancel()

    def look_at_memory(self) -> None:
        """Called once a second, so that a sudden death can be told from a lack of memory."""
        self._least_free = _free()

    async def condemn(self, why: str) -> None:
        """End one that hangs: its stacks are written to the log, then it is killed."""
        self.hung = why
        if native.dump_stacks(self.pid):
            await self._left_within(DUMP_S)
        self._kill()

    async def end(self, remote: RemoteEngine | None, grace_s: float) -> None:
        """Ask it to end, then SIGTERM, then SIGKILL. Returns when it is gone; at most grace_s + TERM_S + REAP_S."""
        self.ending = True
        if remote is not None:
            await remote.shutdown(grace_s)
        if not await self._left_within(grace_s if remote is not None else 0.0):
            native.end_group(self.pid, force=False)
            if not await self._left_within(TERM_S):
                self._kill()
                await self._left_within(REAP_S)
        await self._tidy()

    async def leave(self) -> None:
        """Stop to listen, and let it live for another daemon."""
        await self._tail.close()

    async def autopsy(self, *, loading: bool) -> EngineError:
        """Why it ended. One that lost its connection but still runs has stopped answering: it is killed."""
        if not await self._left_within(REAP_S):
            self.hung = self.hung or "no longer answered"
            self._kill()
            await self._left_within(REAP_S)
        await self._tidy()
        return explain(self.death(self._body.exit_code, loading=loading))

    def death(self, exit_code: int | None, *, loading: bool) -> Death:
        return Death(
            exit_code=exit_code,
            signal=native.signal_name(exit_code) if exit_code is not None else None,
            last_lines=tuple(self._output.log.last(LAST_LINES)),
            loading=loading,
            kernel_oom_kills=(native.kernel_oom_kills() or 0) - self._oom_kills_before,
            least_free=self._least_free,
            total=Bytes(psutil.virtual_memory().total),
            hung=self.hung,
        )

    def _kill(self) -> None:
        if not self._body.gone:
            native.end_group(self.pid, force=True)

    async def _left_within(self, seconds: float) -> bool:
        """Whether it is gone after at most so long."""
        deadline = time.monotonic() + seconds
        while not self._body.gone:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    async def _tidy(self) -> None:
        """The rest of its output is read, and what it leaves behind is removed."""
        await self._tail.close()
        self._meeting.clear()


def _start(command: list[str], output: Path) -> subprocess.Popen[bytes]:
    descriptor = tail.create(output)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            env=child_environment(),
            **native.own_group(),
        )
    finally:
        os.close(descriptor)


def _sign(meeting: Meeting, pid: int) -> None:
    """Write down who it is before it does so itself: this daemon may be gone by then."""
    try:
        began = psutil.Process(pid).create_time()
    except psutil.Error:  # gone already
        return
    msgspec.structs.replace(meeting.where, pid=pid, start_time=began).write(meeting.record)


def _free() -> Bytes:
    return Bytes(psutil.virtual_memory().available)
