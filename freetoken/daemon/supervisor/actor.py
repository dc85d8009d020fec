"""The one owner of the engine: loads, unloads, watches, and says what state it is in.

One piece of lifecycle work runs at a time; a second one that conflicts is refused, not queued. A load is prepared
(files, plan) before the engine that runs is touched, so that a bad request loses nothing. Lives in one event loop;
whatever blocks runs in threads. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from freetoken.api.host import LoadedModel
from freetoken.catalog.checkpoint import Checkpoint
from freetoken.core.errors import EngineDied, EngineError, FreeTokenError, LifecycleBusy, LoadTimeout, from_code
from freetoken.core.units import Bytes
from freetoken.daemon import failures
from freetoken.daemon.errors import problem, unexpected
from freetoken.daemon.events import Hub
from freetoken.daemon.operations import Operations
from freetoken.daemon.shelf import Shelf, Shelved
from freetoken.daemon.state import EngineState, EngineStatus, Operation, OperationState, utc
from freetoken.daemon.store import Home
from freetoken.daemon.supervisor.autopsy import LAST_LINES
from freetoken.daemon.supervisor.child import EngineProcess, Output
from freetoken.daemon.supervisor.logs import EngineLog
from freetoken.daemon.supervisor.prepare import Parts, PlanJson
from freetoken.daemon.supervisor.progress import LoadProgress
from freetoken.daemon.supervisor.states import WARMING_PHASES, check_move
from freetoken.settings.load import parse_options
from freetoken.settings.schema import Settings
from freetoken.text.codec import TextCodec
from freetoken.wire.messages import Failed, Phase, Ready
from freetoken.wire.remote import RemoteEngine

ORPHAN_GRACE_S = 0.0  # no daemon takes over an engine that it did not start: without this one it ends at once
DRAIN_LOOK_S = 0.1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wish:
    """What one load was asked for."""

    row: Shelved
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Running:
    """An engine that answers."""

    wish: Wish
    process: EngineProcess
    remote: RemoteEngine
    model: LoadedModel
    ready: Ready
    since: float  # unix seconds


@dataclass(frozen=True, slots=True)
class Desk:
    """Where the supervisor writes: the books of the daemon."""

    hub: Hub
    operations: Operations
    shelf: Shelf


class Supervisor:
    """See the module. `state` and `running` are read by anyone, changed here only."""

    def __init__(self, home: Home, settings: Settings, desk: Desk, parts: Parts) -> None:
        self.state = EngineState(since=utc(time.time()))
        self.running: Running | None = None
        self._home, self._settings, self._desk, self._parts = home, settings, desk, parts
        self._job: asyncio.Task[None] | None = None
        self._wish: Wish | None = None  # of the load that runs
        self._process: EngineProcess | None = None  # of the load that runs
        self._watching: asyncio.Task[None] | None = None
        self._cancel_asked = self._retiring = False
        self._log = EngineLog(home.logs / "engine.log")

    # ── what may be asked ───────────────────────────────────────────────────────────────────────────────────────────
    def load(self, model: str, options: Mapping[str, object]) -> Operation | None:
        """Begin to load an id, or the absolute path of a local folder or .gguf file; None if it is loaded like that.

        The same wish while it is being loaded gives the running operation. Raises ModelNotFound, SettingError,
        LifecycleBusy.
        """
        row = self._desk.shelf.locate(model)
        wish = Wish(row, parse_options(options))
        if self._busy():
            if _same(wish, self._wish) and self.state.operation:
                return self._desk.operations.get(self.state.operation)
            raise self._refusal()
        if self.running is not None and _same(wish, self.running.wish):
            return None
        operation = self._begin("load", row.id, lambda id: self._load(wish, self._progress(id, row.id)))
        self._wish = wish
        return operation

    def unload(self, *, drain_s: float = 0.0) -> Operation | None:
        """Begin to end the engine, after what runs or `drain_s`; None where there is none. Raises LifecycleBusy."""
        if self._busy():
            raise self._refusal()
        running = self.running
        if running is None:
            if self.state.state is EngineStatus.FAILED:
                self._move(EngineStatus.STOPPED, model=None, options={}, pid=None)
            return None
        return self._begin("unload", running.model.id, lambda _: self._retire(running, drain_s))

    async def settled(self, timeout_s: float) -> bool:
        """Waits until no lifecycle work runs. False where `timeout_s` passed before."""
        if self._job is not None:
            await asyncio.wait({self._job}, timeout=timeout_s)
        return not self._busy()

    async def close(self) -> None:
        """Ends whatever runs, the engine included."""
        if self._job is not None and not self._job.done():
            self._cancel()
            await asyncio.wait({self._job})  # it has its own deadlines
        if self.running is not None:
            await self._retire(self.running, 0.0)
        self._log.close()

    # ── the work ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _begin(self, kind: str, subject: str, work: Callable[[str], Awaitable[None]]) -> Operation:
        self._cancel_asked = False
        operation = self._desk.operations.begin(kind, subject, self._cancel)
        self.state = replace(self.state, operation=operation.id)
        self._job = asyncio.create_task(self._work(operation.id, work))
        return operation

    def _cancel(self) -> None:
        """Ends the work, once; while an engine is on its way out, as soon as it is out."""
        if self._cancel_asked or self._job is None:
            return
        self._cancel_asked = True
        if not self._retiring:
            self._job.cancel()

    async def _work(self, id: str, work: Callable[[str], Awaitable[None]]) -> None:
        """Runs lifecycle work to its end and closes its operation, however it ends."""
        outcome: tuple[OperationState, dict[str, Any] | None] = (OperationState.SUCCEEDED, None)
        try:
            await self._death_settled()
            await work(id)
        except asyncio.CancelledError:
            outcome = (OperationState.CANCELLED, None)
        except Exception as error:  # noqa: BLE001 - whatever it is, the operation carries it to whoever asked
            outcome = (OperationState.FAILED, problem(_known(error)))
        finally:
            self._wish = None
            self.state = replace(self.state, operation=None)
            self._desk.operations.finish(id, *outcome)

    async def _load(self, wish: Wish, progress: LoadProgress) -> None:
        try:
            if self.running is None:
                self._move(EngineStatus.STARTING, model=wish.row.id, options=dict(wish.options), failure=None, pid=None)
            checkpoint, plan = await self._prepare(wish, progress)
            if self.running is not None:
                await self._retire(self.running, self._settings.stop_deadline_s)
                if self._cancel_asked:
                    raise asyncio.CancelledError
                self._move(EngineStatus.STARTING, model=wish.row.id, options=dict(wish.options), failure=None)
            self.running = await self._start(wish, checkpoint, plan, progress)
        except asyncio.CancelledError:
            await self._give_up(None)
            raise
        except Exception as error:
            known = _known(error)
            await self._give_up(problem(known))
            self._publish("load.failed", problem(known), wish.row.id)
            raise known from error
        self._move(EngineStatus.READY)
        self._watching = asyncio.create_task(self._watch(self.running))
        ready = self.running.ready
        compared = await asyncio.to_thread(self._parts.conclude, wish.row.path, ready.plan, ready.measured)
        self._publish("plan.compared", compared, wish.row.id)
        self._publish("load.completed", {"measured": ready.measured}, wish.row.id)

    async def _prepare(self, wish: Wish, progress: LoadProgress) -> tuple[Checkpoint, PlanJson]:
        """Everything that can be known before a process starts."""
        async with asyncio.timeout(self._settings.load_stall_s):
            progress.enter("verify")
            checkpoint = await asyncio.to_thread(self._parts.open, wish.row.path)
            if wish.row.id.startswith("local/"):
                self._desk.shelf.remember(wish.row)
            progress.enter("plan")
            released = self.running.remote.stats if self.running else None
            held = Bytes(released.rss_bytes if released else 0)
            plan = await asyncio.to_thread(self._parts.plan, checkpoint, wish.options, held)
        self._publish("plan.created", plan, wish.row.id)
        return checkpoint, plan

    async def _start(self, wish: Wish, checkpoint: Checkpoint, plan: PlanJson, progress: LoadProgress) -> Running:
        """A process with the model in it, and the tokenizer, which is read meanwhile."""
        progress.enter("spawn")
        output = Output(self._log, self._tell_line)
        process = await EngineProcess.spawn(self._parts.worker, self._home.engine_record, output, ORPHAN_GRACE_S)
        self._process = process
        self._move(EngineStatus.LOADING, pid=process.pid)
        reading = asyncio.create_task(asyncio.to_thread(self._parts.text, checkpoint.text))
        building = asyncio.create_task(self._build(process, plan, {"model": str(checkpoint.path)}, progress))
        try:
            text, (remote, ready) = await asyncio.gather(reading, building)
        except BaseException:
            building.cancel()
            reading.add_done_callback(_close_text)
            raise
        self._process = None
        model = LoadedModel(
            id=wish.row.id,
            backend=remote,
            text=text,
            context_tokens=int(ready.plan["resolved"]["max_seq_len"]["value"]),  # type: ignore[index]
            eos_ids=checkpoint.eos_ids,
            sampling_defaults=checkpoint.sampling_defaults,
        )
        return Running(wish, process, remote, model, ready, time.time())

    async def _build(
        self, process: EngineProcess, plan: PlanJson, files: dict[str, str], progress: LoadProgress
    ) -> tuple[RemoteEngine, Ready]:
        """Connect and follow the load. A stall is no message for load_stall_s; time that moves has no limit."""
        remote = await process.connect()
        remote.on_beat = lambda _: process.look_at_memory()
        stall_s = self._settings.load_stall_s
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(stall_s) as stall:
                async for message in remote.load(plan, files):
                    stall.reschedule(now() + stall_s)
                    if isinstance(message, Ready):
                        return remote, message
                    if isinstance(message, Failed):
                        raise from_code(message.code, message.detail, message.numbers)
                    self._follow(message, progress)
        except EngineDied:
            raise await process.autopsy(loading=True) from None
        except TimeoutError:
            detail = f"The load stood still for {stall_s:g} s in the phase {progress.phase}."
            raise LoadTimeout(
                detail, numbers={"stall_s": stall_s}, fixes=("Load again", "Raise the setting load_stall_s")
            ) from None
        raise await process.autopsy(loading=True)

    def _follow(self, phase: Phase, progress: LoadProgress) -> None:
        if phase.name in WARMING_PHASES and self.state.state is EngineStatus.LOADING:
            self._move(EngineStatus.WARMING)
        progress.enter(phase.name, phase.done, phase.total, phase.unit)

    async def _give_up(self, failure: dict[str, Any] | None) -> None:
        """Leaves a load: its process ends, an engine that ran before and still does is left alone."""
        process, self._process = self._process, None
        if self.running is not None:
            return
        if process is not None:
            if failure is None:
                self._move(EngineStatus.STOPPING)
            await process.end(None, 0.0)
        elif self.state.state is EngineStatus.STOPPED:
            return
        self._move(EngineStatus.FAILED if failure else EngineStatus.STOPPED, failure=failure, pid=None)

    async def _retire(self, running: Running, drain_s: float) -> None:
        """Ends an engine that runs: nothing new, what runs until `drain_s`, then away. Is never cut short."""
        self._retiring = running.process.ending = True
        if drain_s > 0:
            self._move(EngineStatus.DRAINING)
            await _drained(running.remote, drain_s)
        self._move(EngineStatus.STOPPING)
        self.running = None
        await running.process.end(running.remote, self._settings.stop_deadline_s)
        running.model.text.close()
        self._retiring = False
        self._move(EngineStatus.STOPPED, model=None, options={}, pid=None)

    async def _watch(self, running: Running) -> None:
        """Until the engine is gone. If nobody asked it to go, its death is explained and told."""
        await running.remote.wait_gone()
        if running.process.ending:
            return
        self.running = None
        error = await running.process.autopsy(loading=False)
        await running.remote.close()
        running.model.text.close()
        log.error("engine: %s", error.detail)
        self._move(EngineStatus.FAILED, failure=problem(error), pid=None)
        self._publish("engine.crashed", _crash(error, self._log.last(LAST_LINES)), running.model.id)

    async def _death_settled(self) -> None:
        """Waits for a death that is being explained (it is bounded), so that a new load finds a settled state."""
        if self._watching is not None and self.running is None:
            await asyncio.wait({self._watching})

    # ── telling ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _move(self, status: EngineStatus, **changes: Any) -> None:
        check_move(self.state.state, status)
        self.state = replace(self.state, state=status, since=utc(time.time()), **changes)
        if status is EngineStatus.FAILED:
            failures.remember(self._home, self.state)
        self._publish("engine.state_changed", msgspec.to_builtins(self.state), self.state.model)

    def _publish(self, type: str, data: Any, model: str | None) -> None:
        self._desk.hub.publish(type, data, subject=model, corr=self.state.operation, source="supervisor")

    def _tell_line(self, line: str) -> None:
        self._desk.hub.publish("log.line", {"line": line}, subject="engine", source="engine")

    def _progress(self, id: str, model: str) -> LoadProgress:
        return LoadProgress(self._desk.hub, self._desk.operations, id, model)

    def _busy(self) -> bool:
        return self._job is not None and not self._job.done()

    def _refusal(self) -> LifecycleBusy:
        operation = self._desk.operations.get(self.state.operation or "")
        return LifecycleBusy(
            f"A {operation.kind} of {operation.subject} is running (operation {operation.id}).",
            numbers={"operation": operation.id},
            fixes=("Wait for it", f"Cancel it: POST /api/v1/operations/{operation.id}/cancel"),
        )

    def awaits(self, model: str) -> bool:
        """Whether that model is on its way."""
        return self._busy() and self._wish is not None and self._wish.row.id == model


async def _drained(remote: RemoteEngine, deadline_s: float) -> None:
    """Returns when nothing runs any more, or after `deadline_s`; the engine cancels the rest then."""
    remote.drain(deadline_s)
    with contextlib.suppress(TimeoutError, EngineDied):  # in both cases there is nothing left to wait for
        async with asyncio.timeout(deadline_s + 1.0):
            while (stats := await remote.status()).running + stats.queued > 0:
                await asyncio.sleep(DRAIN_LOOK_S)


def _crash(error: EngineError, last_lines: list[str]) -> dict[str, Any]:
    """The data of engine.crashed. Nothing is started again by itself: there is no attempt to count."""
    return {
        "exit": error.numbers.get("exit_code"),
        "signal": error.numbers.get("signal"),
        "oom_killed": bool(error.numbers.get("oom_killed")),
        "last_lines": last_lines,
        "attempt": None,
        "backoff_ms": None,
        "error": problem(error),
    }


def _same(wish: Wish, other: Wish | None) -> bool:
    return other is not None and (wish.row.path, wish.options) == (other.row.path, other.options)


def _known(error: Exception) -> FreeTokenError:
    if isinstance(error, FreeTokenError):
        return error
    log.error("lifecycle work failed", exc_info=error)
    return unexpected(error)


def _close_text(reading: asyncio.Task[TextCodec]) -> None:
    """The tokenizer of a load that failed, read all the same."""
    if not reading.cancelled() and reading.exception() is None:
        reading.result().close()
