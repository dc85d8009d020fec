"""One attempt to have a model answer: files, plan, process, model, tokenizer; or a process that another daemon began.

Says how far it is; whoever made the attempt ends its process where it comes to nothing. Does not know states or what
ran before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freetoken.api.host import LoadedModel
from freetoken.catalog.checkpoint import Checkpoint
from freetoken.core.errors import EngineDied, EngineProtocolError, LoadTimeout, from_code
from freetoken.core.units import Bytes
from freetoken.daemon.supervisor.child import EngineProcess
from freetoken.daemon.supervisor.prepare import Parts, PlanJson
from freetoken.daemon.supervisor.progress import LoadProgress
from freetoken.daemon.supervisor.tail import Output
from freetoken.daemon.supervisor.wish import Wish
from freetoken.settings.schema import Settings
from freetoken.text.codec import TextCodec
from freetoken.wire.messages import Failed, Ready
from freetoken.wire.remote import LoadEvent, RemoteEngine

FIRST_WORD_S = 5.0  # an engine that is taken over says at once where it is
BUSY_S = 5.0  # until it has noticed that its former daemon is gone
RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Running:
    """An engine that answers."""

    wish: Wish
    process: EngineProcess
    remote: RemoteEngine
    model: LoadedModel
    ready: Ready
    since: float  # unix seconds

    @property
    def gone(self) -> bool:
        """Whether it has just died; its death is not explained yet."""
        return self.remote.gone is not None


@dataclass(frozen=True, slots=True)
class Workshop:
    """What every attempt is made with."""

    settings: Settings
    parts: Parts
    record: Path  # runtime/engine.json
    output: Output


class Attempt:
    """`on_phase` is called with each phase that the engine reports."""

    def __init__(self, shop: Workshop, wish: Wish, progress: LoadProgress, on_phase: Callable[[str], None]) -> None:
        self.process: EngineProcess | None = None
        self._allowed_s = shop.settings.load_stall_s  # without a sign of life
        self._shop, self._wish, self._progress, self._on_phase = shop, wish, progress, on_phase

    async def check(self) -> Checkpoint:
        """What is on disk. Raises CheckpointError."""
        self._progress.enter("verify")
        async with self._moving():
            return await asyncio.to_thread(self._shop.parts.open, self._wish.row.path)

    async def plan(self, checkpoint: Checkpoint, released: Bytes) -> PlanJson:
        """Whether and how it fits once `released` is free. Raises PlanError."""
        self._progress.enter("plan")
        async with self._moving():
            return await asyncio.to_thread(self._shop.parts.plan, checkpoint, self._wish.options, released)

    def spawn(self) -> EngineProcess:
        """A new process. Raises EngineStartFailed."""
        self._progress.enter("spawn")
        shop = self._shop
        grace_s = shop.settings.orphan_grace_s
        self.process = EngineProcess.spawn(shop.parts.worker, shop.record, shop.output, grace_s)
        return self.process

    async def build(self, process: EngineProcess, checkpoint: Checkpoint, plan: PlanJson) -> Running:
        """The model in `process`, and the tokenizer, which is read meanwhile. Raises what it failed on."""

        async def ready() -> tuple[RemoteEngine, Ready]:
            remote = await process.connect()
            files = {"model": str(checkpoint.path)}
            return remote, await self._follow(process, remote, remote.load(plan, files))

        return await self._with_text(process, checkpoint, ready())

    async def take_over(self, process: EngineProcess, checkpoint: Checkpoint) -> Running:
        """An engine of an earlier daemon, loaded or loading. Raises EngineError where it does not answer."""
        self.process = process

        async def ready() -> tuple[RemoteEngine, Ready]:
            remote = await self._reach(process)
            return remote, await self._follow(process, remote, remote.follow(), FIRST_WORD_S)

        return await self._with_text(process, checkpoint, ready())

    async def _reach(self, process: EngineProcess) -> RemoteEngine:
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                return await process.connect()
            except EngineProtocolError:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(RETRY_S)

    async def _with_text(
        self, process: EngineProcess, checkpoint: Checkpoint, readying: Coroutine[Any, Any, tuple[RemoteEngine, Ready]]
    ) -> Running:
        reading = asyncio.create_task(asyncio.to_thread(self._shop.parts.text, checkpoint.text))
        building = asyncio.create_task(readying)
        try:
            text, (remote, ready) = await asyncio.gather(reading, building)
        except BaseException:
            building.cancel()
            reading.add_done_callback(_close_text)
            raise
        model = LoadedModel(
            id=self._wish.row.id,
            backend=remote,
            text=text,
            context_tokens=int(ready.plan["resolved"]["max_seq_len"]["value"]),  # type: ignore[index]
            eos_ids=checkpoint.eos_ids,
            sampling_defaults=checkpoint.sampling_defaults,
        )
        return Running(self._wish, process, remote, model, ready, time.time())

    async def _follow(
        self,
        process: EngineProcess,
        remote: RemoteEngine,
        events: AsyncGenerator[LoadEvent, None],
        first_s: float | None = None,
    ) -> Ready:
        """Up to ready. A stall is no message for load_stall_s (`first_s` at first); time that moves has no limit."""
        remote.on_beat = lambda _: process.look_at_memory()
        try:
            async with self._moving(first_s) as stall, aclosing(events):
                async for message in events:
                    self._allowed_s = self._shop.settings.load_stall_s
                    stall.reschedule(asyncio.get_running_loop().time() + self._allowed_s)
                    if isinstance(message, Ready):
                        return message
                    if isinstance(message, Failed):
                        raise from_code(message.code, message.detail, message.numbers)
                    self._on_phase(message.name)
                    self._progress.enter(message.name, message.done, message.total, message.unit)
        except EngineDied:
            raise await process.autopsy(loading=True) from None
        raise await process.autopsy(loading=True)

    @asynccontextmanager
    async def _moving(self, within_s: float | None = None) -> AsyncIterator[asyncio.Timeout]:
        """Raises LoadTimeout where a phase takes longer than that without a sign of life."""
        self._allowed_s = self._shop.settings.load_stall_s if within_s is None else within_s
        try:
            async with asyncio.timeout(self._allowed_s) as stall:
                yield stall
        except TimeoutError:
            stall_s = self._allowed_s
            detail = f"The load stood still for {stall_s:g} s in the phase {self._progress.phase}."
            raise LoadTimeout(
                detail, numbers={"stall_s": stall_s}, fixes=("Load again", "Raise the setting load_stall_s")
            ) from None


def _close_text(reading: asyncio.Task[TextCodec]) -> None:
    """The tokenizer of a load that failed, read all the same."""
    if not reading.cancelled() and reading.exception() is None:
        reading.result().close()
