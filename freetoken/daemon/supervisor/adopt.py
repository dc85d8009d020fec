"""What an earlier daemon left running: found by runtime/engine.json, believed only by pid and start time, or ended.

The engine itself checks the secret when it is spoken to. Does not know whether it is wanted.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from freetoken.core.errors import EngineError
from freetoken.daemon.supervisor.child import EngineProcess, Meeting
from freetoken.daemon.supervisor.tail import Output
from freetoken.wire.rendezvous import Rendezvous

CONNECT_S = 5.0  # an engine that is only to be told to end


def find(record: Path, output: Output) -> EngineProcess | None:
    """The engine that still runs. What one that does not has left is removed."""
    where = Rendezvous.find(record)
    if where is None:
        record.unlink(missing_ok=True)
        return None
    meeting = Meeting(where, record)
    process = EngineProcess.adopt(meeting, output)
    if process is None:
        meeting.clear()
    return process


async def end(process: EngineProcess, grace_s: float) -> None:
    """Tell it to end, or make it."""
    remote = None
    with contextlib.suppress(EngineError):  # it does not listen: the signals are left
        remote = await process.connect(CONNECT_S)
    await process.end(remote, grace_s)
