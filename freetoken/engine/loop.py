"""Receive, schedule, run, publish: the one thread that computes.

Commands come in from any thread; events leave through `publish`, once a step, on this thread. An allocation that fails
makes the next step smaller and ends at most the one request that has no smaller step. Any other exception in a step
ends the loop: every caller is told, then it is raised. Does not know sockets, event loops or tensors.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from freetoken.core.errors import EngineError, FreeTokenError, LifecycleBusy, OutOfMemory
from freetoken.core.events import Failed
from freetoken.core.ports import Clock
from freetoken.core.types import GenerateRequest
from freetoken.engine.paging.rules import Layout
from freetoken.engine.scheduler.scheduler import Scheduler, Told
from freetoken.engine.status import Meter
from freetoken.engine.step import StepPlan, StepResult
from freetoken.plan.choices import Resolved
from freetoken.wire.messages import Stats

REPORT_S = 1.0


class StepRunner(Protocol):
    """What computes a step (runner/, or a test's fake)."""

    def run(self, plan: StepPlan) -> StepResult:
        """Compute `plan`. A failed allocation raises OutOfMemory, MemoryError or torch's RuntimeError.

        Then the same positions are computed again in smaller steps. Keys and values may be written half, the retry
        writes them anew; recurrent states must be as they were before the call, so whoever has them puts them back
        before it raises.
        """
        ...

    def expert_tokens(self) -> tuple[tuple[int, ...], ...]:
        """Tokens routed so far, by routed layer and expert."""
        ...


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str | None  # None: all


@dataclass(frozen=True, slots=True)
class _Drain:
    deadline_s: float  # from now


@dataclass(frozen=True, slots=True)
class _Resize:
    num_pages: int


class _Report:
    """Asks for a report now."""


class _Stop:
    """Ends the loop."""


_Command = GenerateRequest | _Cancel | _Drain | _Resize | _Report | _Stop


class EngineLoop:
    """`publish` and `on_stats` are called on the thread that runs `run`; they must not wait."""

    def __init__(
        self,
        runner: StepRunner,
        resolved: Resolved,
        layout: Layout,
        publish: Callable[[Sequence[Told]], None],
        on_stats: Callable[[Stats], None] | None = None,
        clock: Clock = time,
    ) -> None:
        self._runner, self._publish, self._on_stats, self._clock = runner, publish, on_stats, clock
        self._scheduler = Scheduler(resolved, layout, clock)
        self._meter = Meter(self._scheduler, clock)
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._stopped = False
        self._idle = True
        self._drain_until: float | None = None  # monotonic; set once draining
        self._drained = False
        self._next_report = clock.monotonic() + REPORT_S
        self._step = 0
        self._step_began: float | None = None

    # ── from any thread ─────────────────────────────────────────────────────────────────────────────────────────────
    def submit(self, request: GenerateRequest) -> None:
        """Refusals are published as Failed, like everything that happens to a request."""
        self._inbox.put(request)

    def cancel(self, request_id: str) -> None:
        """Frees what the request holds, at the latest when the running step ends. Nothing more is published of it."""
        self._inbox.put(_Cancel(request_id))

    def cancel_all(self) -> None:
        """End every request; each is published as cancelled."""
        self._inbox.put(_Cancel(None))

    def drain(self, deadline_s: float) -> None:
        """Refuse new requests, cancel those left after `deadline_s`, report when none is left."""
        self._inbox.put(_Drain(deadline_s))

    def resize(self, num_pages: int) -> None:
        """The KV pool has `num_pages` pages from the next step on: those above are not touched any more.

        Requests on them are put back and go on later; what can never fit any more fails.
        """
        self._inbox.put(_Resize(num_pages))

    def report(self) -> None:
        self._inbox.put(_Report())

    def stop(self) -> None:
        """`run` returns after the step that is running. Callers in flight are not told."""
        self._inbox.put(_Stop())

    def pulse(self) -> tuple[int, int]:
        """(number of the latest step, its age in ms); age 0 when no step is running."""
        began = self._step_began
        return self._step, 0 if began is None else round((self._clock.monotonic() - began) * 1000)

    # ── on the engine's own thread ──────────────────────────────────────────────────────────────────────────────────
    def run(self) -> None:
        """Until `stop`. Raises what a step raised, after telling every caller."""
        try:
            while not self._stopped:
                self._turn()
        except Exception as error:
            fault = Failed(EngineError.code, f"The engine stopped on an unexpected {type(error).__name__}: {error}")
            self._publish([*self._scheduler.take_events(), *((name, fault) for name in self._scheduler.live_ids)])
            raise

    def _turn(self) -> None:
        self._receive()
        self._scheduler.expire()
        plan = self._scheduler.next_plan()
        self._idle = plan is None
        if plan is not None:
            self._compute(plan)
        self._finish_drain()
        if events := self._scheduler.take_events():
            self._publish(events)
        if self._clock.monotonic() >= self._next_report:
            self._report_now()

    def _receive(self) -> None:
        """All commands that have come; when idle, wait for one until the next report is due."""
        try:
            if self._idle:
                self._obey(self._inbox.get(timeout=max(0.0, self._next_report - self._clock.monotonic())))
            while True:
                self._obey(self._inbox.get_nowait())
        except queue.Empty:
            return

    def _obey(self, command: _Command) -> None:
        match command:
            case GenerateRequest():
                self._admit(command)
            case _Cancel(request_id=None):
                self._scheduler.cancel_all()
            case _Cancel(request_id=str() as request_id):
                self._scheduler.cancel(request_id)
            case _Drain(deadline_s=deadline_s):
                self._drain_until = self._clock.monotonic() + deadline_s
            case _Resize(num_pages=num_pages):
                self._scheduler.resize(num_pages)
            case _Report():
                self._report_now()
            case _Stop():
                self._stopped = True

    def _admit(self, request: GenerateRequest) -> None:
        try:
            if self._drain_until is not None:
                raise LifecycleBusy("The model is being unloaded and takes no new request.")
            self._scheduler.submit(request)
        except FreeTokenError as error:
            self._publish([(request.id, Failed(error.code, error.detail, error.numbers))])

    def _compute(self, plan: StepPlan) -> None:
        self._step += 1
        self._step_began = self._clock.monotonic()
        try:
            result = self._runner.run(plan)
        except (OutOfMemory, MemoryError, RuntimeError) as error:
            if not _is_allocation(error):
                raise
            self._scheduler.retry(plan, _out_of_memory(plan, error))
        else:
            self._scheduler.accept(plan, result)
        finally:
            self._step_began = None

    def _finish_drain(self) -> None:
        if self._drain_until is None or self._drained:
            return
        if self._scheduler.live_ids and self._clock.monotonic() < self._drain_until:
            return
        self._scheduler.cancel_all()
        self._drained = True
        self._report_now()

    def _report_now(self) -> None:
        self._next_report = self._clock.monotonic() + REPORT_S
        if self._on_stats is not None:
            self._on_stats(self._meter.stats(self._runner.expert_tokens()))


def _is_allocation(error: Exception) -> bool:
    """torch reports a failed allocation as a RuntimeError that only its text tells from a bug."""
    if isinstance(error, OutOfMemory | MemoryError):
        return True
    text = str(error).lower()
    return "out of memory" in text or "allocate memory" in text


def _out_of_memory(plan: StepPlan, error: Exception) -> OutOfMemory:
    if isinstance(error, OutOfMemory):
        return error
    context = max(work.end for work in plan.work)
    return OutOfMemory(
        f"Memory ran out in a step of {plan.tokens} tokens over {len(plan.work)} requests, at {context:,} tokens of "
        "context, and no smaller step is possible: close other programs, or load the model with a smaller "
        "--max-prefill-length or --num-tokens.",
        numbers={"tokens": plan.tokens, "requests": len(plan.work), "context_tokens": context},
    )
