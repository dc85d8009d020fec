"""The way out of an engine: until nothing runs in it any more, and until its memory is really free.

Host memory is back when the process is gone. A GPU's driver may hold a dead process's memory for a while: a probe says
so. Does not know how a probe asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from freetoken.core.errors import EngineDied, OutOfMemory
from freetoken.core.units import Bytes
from freetoken.daemon.supervisor.launch import Running
from freetoken.daemon.supervisor.probe import MemoryProbe
from freetoken.daemon.supervisor.telling import MEMORY_HELD, Teller
from freetoken.wire.remote import RemoteEngine

BACK_S = 10.0  # longest wait; then it is said and not waited for any more
POLL_S = 0.1


async def memory_back(probe: MemoryProbe, pid: int, within_s: float | None = None) -> Bytes:
    """What is still held by the process that has ended, after at most `within_s` (BACK_S): 0 if all is well."""
    deadline = time.monotonic() + (BACK_S if within_s is None else within_s)
    while held := await probe.held_by(pid):
        if time.monotonic() >= deadline:
            return held
        await asyncio.sleep(POLL_S)
    return Bytes(0)


async def check_memory_back(probe: MemoryProbe, running: Running, tell: Teller) -> None:
    """`memory_back`; what does not come back becomes a diagnosis, which stands until an engine leaves none."""
    held = await memory_back(probe, running.process.pid)
    if not held:
        tell.clear(MEMORY_HELD)
        return
    detail = f"The engine of {running.model.id} has ended, but the driver still holds {held} for it."
    fixes = ("Wait a minute", "See with nvidia-smi who holds it", "Restart the computer")
    tell.diagnose(MEMORY_HELD, OutOfMemory(detail, numbers={"bytes": int(held)}, fixes=fixes), [])


async def drained(remote: RemoteEngine, deadline_s: float) -> None:
    """Returns when nothing runs any more, or after `deadline_s`; the engine cancels the rest then."""
    remote.drain(deadline_s)
    with contextlib.suppress(TimeoutError, EngineDied):  # in both cases there is nothing left to wait for
        async with asyncio.timeout(deadline_s + 1.0):
            while (stats := await remote.status()).running + stats.queued > 0:
                await asyncio.sleep(POLL_S)
