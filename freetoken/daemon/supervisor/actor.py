"""The one owner of the engine: loads, unloads, watches, starts again, and says what state it is in.

One piece of lifecycle work runs at a time; a second one that conflicts is refused, not queued. A load is prepared
(files, plan) before the engine that runs is touched, so that a bad request loses nothing. What an earlier daemon left
running is taken over. Lives in one event loop; whatever blocks runs in threads. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import msgspec

from freetoken.core.errors import FreeTokenError, ModelNotLoaded
from freetoken.core.units import Bytes
from freetoken.daemon import failures
from freetoken.daemon.errors import problem
from freetoken.daemon.events import Hub
from freetoken.daemon.operations import Operations
from freetoken.daemon.shelf import Shelf
from freetoken.daemon.state import EngineState, EngineStatus, Operation, utc
from freetoken.daemon.store import Home
from freetoken.daemon.supervisor import adopt
from freetoken.daemon.supervisor.autopsy import LAST_LINES
from freetoken.daemon.supervisor.child import EngineProcess
from freetoken.daemon.supervisor.crashes import Crashes
from freetoken.daemon.supervisor.jobs import Jobs, known
from freetoken.daemon.supervisor.launch import Attempt, Running, Workshop
from freetoken.daemon.supervisor.logs import EngineLog
from freetoken.daemon.supervisor.prepare import Parts
from freetoken.daemon.supervisor.progress import LoadProgress
from freetoken.daemon.supervisor.release import check_memory_back, drained
from freetoken.daemon.supervisor.states import WARMING_PHASES, check_move
from freetoken.daemon.supervisor.tail import Output
from freetoken.daemon.supervisor.telling import CRASHED, Teller
from freetoken.daemon.supervisor.watch import watch
from freetoken.daemon.supervisor.wish import Wish, WishFile
from freetoken.settings.load import parse_options
from freetoken.settings.schema import Settings

USUAL_LOAD_S = 5.0  # what a load takes, until one has told
AUTOPSY_S = 1.0  # what a death takes to be explained

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Desk:
    """Where the supervisor writes: the books of the daemon."""

    hub: Hub
    operations: Operations
    shelf: Shelf


class Supervisor:
    """See the module. `state` and `running` are read by anyone, changed here only."""

    def __init__(self, home: Home, settings: Settings, desk: Desk, parts: Parts, jitter: Random | None = None) -> None:
        self.state = EngineState(since=utc(time.time()))
        self.running: Running | None = None
        self.tell = Teller(desk.hub)
        self.crashes = Crashes(self.tell, self._again, jitter or Random())
        self._home, self._settings, self._desk, self._parts = home, settings, desk, parts
        self._log = EngineLog(home.logs / "engine.log")
        self._output = Output(self._log, self.tell.line, self.tell.dropped)
        self._shop = Workshop(settings, parts, home.engine_record, self._output)
        self._wishes = WishFile(home.wish)
        self._jobs = Jobs(desk.operations, self._job_over)
        self._wish: Wish | None = None  # of the load that runs
        self._last: Wish | None = None  # of the latest load
        self._lost: Wish | None = None  # answered until a moment ago, and is to answer again
        self._load_s = USUAL_LOAD_S
        self._watching: asyncio.Task[None] | None = None

    # ── what may be asked ───────────────────────────────────────────────────────────────────────────────────────────
    def begin(self) -> None:
        """Take over what an earlier daemon left running, or load what is wanted at the start. Once, before all else."""
        wish = self._wishes.read()
        process = adopt.find(self._home.engine_record, self._output)
        wanted = wish if self._settings.load_on_start == "last" else None
        if process is not None and wish is not None and wish.engine == process.instance_id:
            self._begin("adopt", wish, lambda progress: self._take_over(wish, process, progress))
        elif process is not None:
            self._begin("unload", wanted, lambda progress: self._send_away(process, wanted, progress))
        elif wanted is not None:
            self._again(wanted)

    def load(self, model: str, options: Mapping[str, object]) -> Operation | None:
        """Begin to load an id, or the absolute path of a local folder or .gguf file; None if it is loaded like that.

        The same wish while it is being loaded gives the running operation. Raises ModelNotFound, SettingError,
        LifecycleBusy.
        """
        return self._ask("load", model, options, self._settings.stop_deadline_s)

    def switch(self, model: str, options: Mapping[str, object], *, drain_s: float | None = None) -> Operation | None:
        """`load`, but where it fails the model that is loaded now is loaded again; what runs gets `drain_s`."""
        return self._ask("switch", model, options, self._settings.stop_deadline_s if drain_s is None else drain_s)

    def restart(self) -> Operation:
        """Begin to end the engine and to start it anew with the same model. Raises ModelNotLoaded, LifecycleBusy."""
        self._jobs.check_free()
        wish = self.running.wish if self.running else self._last
        if wish is None:
            raise ModelNotLoaded("There is no engine to restart: no model is loaded.", fixes=("ft load MODEL",))
        self._take_charge()
        drain_s = self._settings.stop_deadline_s
        return self._begin("restart", wish, lambda progress: self._load(wish, progress, drain_s))

    def unload(self, *, drain_s: float = 0.0) -> Operation | None:
        """Begin to end the engine, after what runs or `drain_s`; None where there is none. Raises LifecycleBusy."""
        self._jobs.check_free()
        dying, running = self._lost, self.running
        self._take_charge()
        self._wishes.clear()
        if running is not None and not running.gone:
            return self._begin("unload", running.wish, lambda _: self._retire(running, drain_s))
        if self.state.state is EngineStatus.READY:
            return self._begin("unload", dying, self._close_the_case)
        if self.state.state is EngineStatus.FAILED:
            self._stopped()
        return None

    async def settled(self, timeout_s: float) -> bool:
        """Waits until no lifecycle work runs. False where `timeout_s` passed before."""
        return await self._jobs.settled(timeout_s)

    async def close(self, *, keep_engine: bool = False) -> None:
        """Ends whatever runs; an engine that answers lives on for `orphan_grace_s` where it is to be kept."""
        self.crashes.call_off()
        await self._jobs.close()
        if self.running is not None and keep_engine:
            await self._leave(self.running)
        elif self.running is not None:
            await self._retire(self.running, 0.0)
        if self._watching is not None:
            await asyncio.wait({self._watching})
        self.crashes.call_off()
        self._log.close()

    def awaits(self, model: str) -> bool:
        """Whether that model is on its way."""
        return self.busy and self._wish is not None and self._wish.row.id == model

    def back_in_s(self, model: str) -> float | None:
        """When that model, whose engine died, is likely to answer again; None where nobody starts it."""
        due = self.crashes.pending
        if due is not None and due.wish.row.id == model:
            return due.in_s + self._load_s
        lost = self.running.wish if self.running and self.running.gone else self._lost
        if lost is None or lost.row.id != model:
            return None
        return self._load_s if self.awaits(model) else AUTOPSY_S

    @property
    def busy(self) -> bool:
        """Whether lifecycle work runs."""
        return self._jobs.running is not None

    # ── the work ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _ask(self, kind: str, model: str, options: Mapping[str, object], drain_s: float) -> Operation | None:
        wish = Wish(self._desk.shelf.locate(model), parse_options(options))
        if self._jobs.running is not None and wish.same_as(self._wish):
            return self._desk.operations.get(self._jobs.running.id)
        self._jobs.check_free()
        if self.running is not None and not self.running.gone and wish.same_as(self.running.wish):
            return None
        self._take_charge()
        work = self._switch if kind == "switch" else self._load
        return self._begin(kind, wish, lambda progress: work(wish, progress, drain_s))

    def _take_charge(self) -> None:
        """Somebody asks for something: what went before starts nothing any more."""
        self.crashes.forget()
        self._lost = None

    def _again(self, wish: Wish) -> None:
        """A load that nobody waits for."""
        if not self.busy:
            self._begin("load", wish, lambda progress: self._load(wish, progress, 0.0, unattended=True))

    def _begin(self, kind: str, wish: Wish | None, work: Callable[[LoadProgress], Awaitable[None]]) -> Operation:
        """Raises LifecycleBusy."""
        subject = wish.row.id if wish else "engine"

        async def settled_work(id: str) -> None:
            await self._death_settled()
            self.crashes.call_off()  # a death that was explained meanwhile starts nothing beside this
            await work(LoadProgress(self._desk.hub, self._desk.operations, id, subject))

        operation = self._jobs.begin(kind, subject, settled_work)
        self.crashes.call_off()
        self.state = replace(self.state, operation=operation.id)
        self._wish = None if kind == "unload" else wish
        return operation

    def _job_over(self) -> None:
        self._wish = None
        self.state = replace(self.state, operation=None)

    async def _load(self, wish: Wish, progress: LoadProgress, drain_s: float, *, unattended: bool = False) -> None:
        """`unattended`: nobody is told of a failure, so it is tried again by the rules of restart.py."""
        began = time.monotonic()
        await self._attempt(wish, progress, lambda attempt: self._start(attempt, wish, drain_s), unattended)
        self._load_s = time.monotonic() - began

    async def _switch(self, wish: Wish, progress: LoadProgress, drain_s: float) -> None:
        old = self.running.wish if self.running else None
        try:
            await self._load(wish, progress, drain_s)
        except FreeTokenError as error:
            if old is not None and self.running is None:
                with contextlib.suppress(FreeTokenError):  # it is in state.failure; the first one is what was asked
                    await self._load(old, progress, 0.0)
                    error.numbers["rolled_back_to"] = old.row.id
            raise

    async def _attempt(
        self,
        wish: Wish,
        progress: LoadProgress,
        start: Callable[[Attempt], Awaitable[Running]],
        unattended: bool,
    ) -> None:
        attempt = Attempt(self._shop, wish, progress, self._phase)
        self._last = wish
        try:
            if self.running is None:
                self._starting(wish)
            running = await start(attempt)
        except asyncio.CancelledError:
            self._lost = None
            await self._give_up(attempt, None, unattended)
            raise
        except Exception as error:
            told = known(error)
            await self._give_up(attempt, problem(told), unattended)
            self._publish("load.failed", problem(told), wish.row.id)
            if unattended:
                self.crashes.failed(wish, told, self._log.last(LAST_LINES))
            self._lost = wish if self.crashes.pending else None
            raise told from error
        self._answers(running)

    async def _start(self, attempt: Attempt, wish: Wish, drain_s: float) -> Running:
        checkpoint = await attempt.check()
        if wish.row.id.startswith("local/"):
            self._desk.shelf.remember(wish.row)
        released = self.running.remote.stats if self.running else None
        plan = await attempt.plan(checkpoint, Bytes(released.rss_bytes if released else 0))
        self._publish("plan.created", plan, wish.row.id)
        if self.running is not None:
            await self._retire(self.running, drain_s)
            if self._jobs.cancel_asked:
                raise asyncio.CancelledError
            self._starting(wish)
        process = attempt.spawn()
        self._wishes.write(replace(wish, engine=process.instance_id))
        self._move(EngineStatus.LOADING, pid=process.pid)
        return await attempt.build(process, checkpoint, plan)

    async def _take_over(self, wish: Wish, process: EngineProcess, progress: LoadProgress) -> None:
        async def start(attempt: Attempt) -> Running:
            attempt.process = process
            self._move(EngineStatus.LOADING, pid=process.pid)
            return await attempt.take_over(process, await attempt.check())

        await self._attempt(wish, progress, start, unattended=True)

    async def _send_away(self, process: EngineProcess, wanted: Wish | None, progress: LoadProgress) -> None:
        """An engine that an earlier daemon was about to end."""
        await adopt.end(process, self._settings.stop_deadline_s)
        if wanted is not None:
            await self._load(wanted, progress, 0.0, unattended=True)

    def _answers(self, running: Running) -> None:
        self.running, self._lost = running, None
        self._move(EngineStatus.READY)
        self.tell.clear(CRASHED)
        self._watching = asyncio.create_task(self._watch(running))
        ready = running.ready
        compared = self._parts.conclude(running.wish.row.path, ready.plan, ready.measured)
        self._publish("plan.compared", compared, running.model.id)
        self._publish("load.completed", {"measured": ready.measured}, running.model.id)

    async def _give_up(self, attempt: Attempt, failure: dict[str, Any] | None, still_wanted: bool) -> None:
        """Leaves a load: its process ends, an engine that ran before and still does is left alone."""
        process = attempt.process
        if self.running is not None:
            return
        if process is not None:
            if failure is None:
                self._move(EngineStatus.STOPPING)
            (self._wishes.let_go if still_wanted else self._wishes.clear)()
            await process.end(None, 0.0)
        elif self.state.state is EngineStatus.STOPPED:
            return
        self._move(EngineStatus.FAILED if failure else EngineStatus.STOPPED, failure=failure, pid=None)

    async def _close_the_case(self, _: LoadProgress) -> None:
        """An engine that died while somebody asked for its end is not missed."""
        if self.state.state is EngineStatus.FAILED:
            self._stopped()

    def _stopped(self) -> None:
        self._move(EngineStatus.STOPPED, model=None, options={}, pid=None)
        self.tell.clear(CRASHED)

    async def _retire(self, running: Running, drain_s: float) -> None:
        """Ends an engine that runs: nothing new, what runs until `drain_s`, then away. Is never cut short."""
        self._jobs.sheltered = running.process.ending = True
        self._wishes.let_go()
        if drain_s > 0:
            self._move(EngineStatus.DRAINING)
            await drained(running.remote, drain_s)
        self._move(EngineStatus.STOPPING)
        self.running = None
        await running.process.end(running.remote, self._settings.stop_deadline_s)
        running.model.text.close()
        await check_memory_back(self._parts.probe, running, self.tell)
        self._jobs.sheltered = False
        self._stopped()

    async def _leave(self, running: Running) -> None:
        self.running, running.process.ending = None, True
        await running.remote.close()
        await running.process.leave()
        running.model.text.close()

    # ── an engine that answers ──────────────────────────────────────────────────────────────────────────────────────
    async def _watch(self, running: Running) -> None:
        """Until the engine is gone. If nobody asked it to go, its death is explained and told."""
        await watch(running, self.tell, self._settings.idle_unload_s, self._idle)
        if not running.process.ending:
            await self._bury(running)

    def _idle(self, running: Running) -> None:
        """Nobody has asked it anything for so long that it may go; whoever asks next may have it loaded again."""
        if not self.busy:
            self._begin("unload", running.wish, lambda _: self._retire(running, 0.0))

    async def _bury(self, running: Running) -> None:
        self.running, self._lost = None, running.wish
        error = await running.process.autopsy(loading=False)
        await running.remote.close()
        running.model.text.close()
        self._wishes.let_go()
        log.error("engine: %s", error.detail)
        self._move(EngineStatus.FAILED, failure=problem(error), pid=None)
        self.crashes.died(running.wish, error, time.time() - running.since, self._log.last(LAST_LINES))
        if self.crashes.pending is None:
            self._lost = None

    async def _death_settled(self) -> None:
        """Waits for a death that is being explained (it is bounded), so that a new load finds a settled state."""
        if self._watching is not None and (self.running is None or self.running.gone):
            await asyncio.wait({self._watching})

    # ── telling ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _starting(self, wish: Wish) -> None:
        options = dict(wish.options)
        self._move(EngineStatus.STARTING, model=wish.row.id, options=options, failure=None, pid=None)

    def _phase(self, name: str) -> None:
        if name in WARMING_PHASES and self.state.state is EngineStatus.LOADING:
            self._move(EngineStatus.WARMING)

    def _move(self, status: EngineStatus, **changes: Any) -> None:
        check_move(self.state.state, status)
        self.state = replace(self.state, state=status, since=utc(time.time()), **changes)
        if status is EngineStatus.FAILED:
            failures.remember(self._home, self.state)
        self._publish("engine.state_changed", msgspec.to_builtins(self.state), self.state.model)

    def _publish(self, type: str, data: Any, model: str | None) -> None:
        self.tell.publish(type, data, model=model, corr=self.state.operation)
