"""Looks at an engine that answers, once a second, until it is gone: does it live, is it used?

Does not know what follows from its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from freetoken.daemon.supervisor import watchdog
from freetoken.daemon.supervisor.launch import Running
from freetoken.daemon.supervisor.telling import Teller
from freetoken.daemon.supervisor.watchdog import Seen, Watchdog

log = logging.getLogger(__name__)


async def watch(running: Running, tell: Teller, idle_unload_s: float, on_idle: Callable[[Running], None]) -> None:
    """Returns when the engine is gone. One that hangs is ended; `on_idle` is called when it is not used for so long.

    0 for `idle_unload_s` never does.
    """
    remote, process, dog = running.remote, running.process, Watchdog()
    gone = asyncio.ensure_future(remote.wait_gone())
    while not (await asyncio.wait({gone}, timeout=watchdog.LOOK_S))[0]:
        if process.ending:
            continue
        beat = remote.beat
        hang = dog.look(Seen(remote.received, beat.step if beat else 0, beat.step_age_ms if beat else 0))
        if hang is not None:
            log.error("engine: %s %s", running.model.id, hang.sentence)
            tell.publish("engine.unresponsive", msgspec.to_builtins(hang), model=running.model.id)
            await process.condemn(hang.sentence)
        elif 0 < idle_unload_s <= remote.idle_s:
            on_idle(running)
