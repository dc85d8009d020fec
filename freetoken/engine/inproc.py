"""The engine in this process, its loop in a thread: core.ports.GenerationBackend for tests and benches.

The twin of wire.remote without a process between. Does not load models: it is given what runs a step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

from freetoken.core.errors import EngineDied
from freetoken.core.events import GenerationEvent
from freetoken.core.types import GenerateRequest
from freetoken.engine.loop import EngineLoop, StepRunner
from freetoken.engine.paging.rules import Layout
from freetoken.engine.scheduler.scheduler import Told
from freetoken.plan.choices import Resolved
from freetoken.wire.messages import Stats
from freetoken.wire.streams import Streams

CLOSE_TIMEOUT_S = 60.0  # the longest step on the slowest machine


class InprocBackend:
    """Make and use it on one event loop; `async with` stops its thread."""

    def __init__(self, runner: StepRunner, resolved: Resolved) -> None:
        self.stats: Stats | None = None  # the latest, once a second
        self._event_loop = asyncio.get_running_loop()
        self._loop = EngineLoop(runner, resolved, Layout(resolved.page_size), self._publish, self._keep)
        self._streams = Streams(self._loop.submit, self._loop.cancel)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> InprocBackend:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        """core.ports.GenerationBackend."""
        return self._streams.run(request)

    async def close(self) -> None:
        """Stop after the running step; streams in flight raise EngineDied. Raises TimeoutError if it never ends."""
        self._loop.stop()
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)

    # ── on the engine's thread ──────────────────────────────────────────────────────────────────────────────────────
    def _run(self) -> None:
        reason = "it was closed"
        try:
            self._loop.run()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise  # threading.excepthook prints it
        finally:
            died = EngineDied(f"The engine has stopped: {reason}.")
            self._event_loop.call_soon_threadsafe(self._streams.end, died)

    def _publish(self, events: Sequence[Told]) -> None:
        self._event_loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: Sequence[Told]) -> None:
        for request_id, event in events:
            self._streams.deliver(request_id, event)

    def _keep(self, stats: Stats) -> None:
        self.stats = stats
