"""Which requests run in the next step, and what became of them after it: continuous batching. Pure.

Every step takes one token of each sequence that decodes, and beside them prefill up to `max_prefill_tokens`: neither
waits for the other. The queue is first in, first out; running requests are in order of admission. When pages run out
the newest running one goes back to the head of the queue, its pages to the prefix cache, and is computed again later.

Use: `submit`, `cancel` and `expire` at any time, then `next_plan`, run it, `accept` (or `abandon`); `take_events`
gives what callers must be told. Not thread-safe. Does not know tensors, threads or sockets.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from freetoken.core.errors import FreeTokenError, QueueFull, QueueTimeout, UsageError
from freetoken.core.events import Failed, GenerationEvent, Progress, Tokens
from freetoken.core.ports import Clock
from freetoken.core.types import FinishReason, GenerateRequest
from freetoken.engine.paging.manager import PageManager
from freetoken.engine.paging.rules import RULES
from freetoken.engine.scheduler.admission import check_length, demand
from freetoken.engine.scheduler.chunking import next_work, remaining
from freetoken.engine.step import Request, Sampled, StepPlan, StepResult, Work
from freetoken.plan.choices import Resolved

Told = tuple[str, GenerationEvent]  # request id, what to tell its caller
RETRY_AFTER_S = 5.0


@dataclass(slots=True)
class Totals:
    """Tokens since the start."""

    prompt: int = 0  # of requests whose prompt is done
    cached: int = 0  # of those, found in the prefix cache
    output: int = 0
    prefilled: int = 0  # computed as prompt, or again after a preemption


class Scheduler:
    def __init__(self, limits: Resolved, clock: Clock) -> None:
        self.pages = PageManager(limits.num_pages, RULES["attention"](limits.page_size))
        self.totals = Totals()
        self._limits = limits
        self._clock = clock
        self._live: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._flying: dict[str, Request] = {}  # those of the step that is being computed
        self._preempted: set[str] = set()
        self._events: list[Told] = []

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def live_ids(self) -> list[str]:
        return list(self._live)

    def take_events(self) -> list[Told]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    # ── coming and going ────────────────────────────────────────────────────────────────────────────────────────────
    def submit(self, asked: GenerateRequest) -> None:
        """Queue a request. Raises UsageError, ContextLengthExceeded (it can never run here) or QueueFull."""
        if asked.id in self._live:
            raise UsageError(f"A request with the id {asked.id} is already running.")
        if not asked.token_ids:
            raise UsageError("The prompt has no tokens.")
        check_length(len(asked.token_ids), self.pages.rule, self._limits)
        self._check_queue()
        request = self._request(asked)
        self._live[request.id] = request
        self._waiting.append(request)
        if request.max_len <= request.prompt_len:
            self._finish(request, Tokens((), cached=0, finish=FinishReason.LENGTH))

    def cancel(self, request_id: str) -> bool:
        """Forget a request and free all it holds; False when it is not there. Nobody is told.

        The pages of one in the step that is being computed are still written to: they are freed when it ends.
        """
        request = self._live.get(request_id)
        if request is None:
            return False
        self._forget(request)
        return True

    def cancel_all(self) -> None:
        """End every request as cancelled, and say so."""
        for request in list(self._live.values()):
            self._finish(request, Tokens((), finish=FinishReason.CANCELLED))

    def expire(self) -> None:
        """Fail what has waited past its deadline, with its position and what it waits for."""
        now = self._clock.monotonic()
        for place, request in enumerate(tuple(self._waiting), start=1):
            if now >= request.deadline_s:
                self._fail(request, self._timeout(request, place))

    # ── one step ────────────────────────────────────────────────────────────────────────────────────────────────────
    def next_plan(self) -> StepPlan | None:
        """The next step; None when nothing can run. The one before must have been accepted or abandoned."""
        assert not self._flying, "a step is being computed"
        work = [*self._decodes(), *self._prefills()]
        self._flying = {part.request_id: self._live[part.request_id] for part in work}
        return StepPlan(tuple(work)) if work else None

    def accept(self, plan: StepPlan, result: StepResult) -> None:
        """Take in what the step computed; drop what was cancelled meanwhile."""
        flying, self._flying = self._flying, {}
        for work in plan.work:
            request = flying[work.request_id]
            if self._is_live(request):
                self._take(request, work, result.sampled.get(request.id))
            else:
                self.pages.release(request)

    def abandon(self, error: FreeTokenError) -> None:
        """The step raised `error`: fail its requests, free what they hold. Others go on."""
        flying, self._flying = self._flying, {}
        for request in flying.values():
            if self._is_live(request):
                self._fail(request, error)
            else:
                self.pages.release(request)

    def _decodes(self) -> list[Work]:
        return [
            next_work(request, 1)
            for request in tuple(self._running)
            if self._is_running(request) and remaining(request) == 1 and self._has_page(request)
        ]

    def _prefills(self) -> list[Work]:
        work = []
        budget = self._limits.max_prefill_tokens
        for request in self._running:
            if budget and remaining(request) > 1:
                self.pages.advance(request)
                work.append(next_work(request, budget))
                budget -= len(work[-1].token_ids)
        while budget and self._waiting and self._admit(self._waiting[0]):
            work.append(next_work(self._running[-1], budget))
            budget -= len(work[-1].token_ids)
        return work

    def _admit(self, request: Request) -> bool:
        """Move the head of the queue to those that run, if it fits now."""
        if len(self._running) >= self._limits.max_running_requests:
            return False
        resumed = request.id in self._preempted
        self.pages.attach(request)
        need = demand(len(request.token_ids), self.pages.rule, held=len(request.pages), resumed=resumed)
        if not (need.fits(self.pages.available) and self.pages.fill(request)):
            self.pages.release(request)
            return False
        if not resumed:
            request.cached = request.computed
        self._waiting.popleft()
        self._running.append(request)
        return True

    def _has_page(self, request: Request) -> bool:
        """A page for the next token of `request`, taken from the newest where none is left. False: it cannot go on."""
        while not self.pages.extend(request):
            if len(self._running) == 1:
                self._finish(request, Tokens((), finish=FinishReason.LENGTH, limited_by="kv_pool"))
                return False
            newest = self._running[-1]
            self._preempt(newest)
            if newest is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self.pages.release(request)
        self._preempted.add(request.id)
        request.deadline_s = self._clock.monotonic() + self._limits.queue_deadline_s
        self._waiting.appendleft(request)

    # ── one request ─────────────────────────────────────────────────────────────────────────────────────────────────
    def _request(self, asked: GenerateRequest) -> Request:
        now, deadline_ms, most = self._clock.monotonic(), asked.deadline_ms, asked.sampling.max_tokens
        window = self._limits.max_seq_len
        return Request.of(
            asked,
            now_s=now,
            deadline_s=now + (self._limits.queue_deadline_s if deadline_ms is None else deadline_ms / 1000),
            max_len=window if most is None else min(window, len(asked.token_ids) + most),
        )

    def _take(self, request: Request, work: Work, sampled: Sampled | None) -> None:
        prefill = request.output_len == 0 or len(work.token_ids) > 1
        request.computed = work.end
        if prefill:
            self.totals.prefilled += len(work.token_ids)
            self.pages.publish(request)
        if request.output_len == 0:
            self._tell(request, Progress(request.computed, request.prompt_len))
        if work.sample:
            assert sampled is not None
            self._append(request, sampled)

    def _append(self, request: Request, sampled: Sampled) -> None:
        cached = None
        if request.output_len == 0:
            cached = request.cached
            self.totals.prompt += request.prompt_len
            self.totals.cached += cached
        if sampled.token_id in request.eos_ids and not request.sampling.ignore_eos:
            self._finish(request, Tokens((), cached=cached, finish=FinishReason.STOP))
            return
        request.token_ids.append(sampled.token_id)
        self.totals.output += 1
        logprobs = (sampled.logprob,) if sampled.logprob is not None else ()
        if len(request.token_ids) < request.max_len:
            self._tell(request, Tokens((sampled.token_id,), logprobs, cached))
            return
        by = self._limited_by(request)
        self._finish(request, Tokens((sampled.token_id,), logprobs, cached, FinishReason.LENGTH, by))

    def _limited_by(self, request: Request) -> str | None:
        """ "kv_pool" where a larger pool, not the caller or the model's window, would have let `request` go on."""
        if request.sampling.max_tokens == request.output_len:
            return None
        return "kv_pool" if self._limits.max_seq_len >= self._limits.num_pages * self._limits.page_size else None

    def _finish(self, request: Request, last: Tokens) -> None:
        self._tell(request, last)
        self._forget(request)

    def _fail(self, request: Request, error: FreeTokenError) -> None:
        self._tell(request, Failed(error.code, error.detail, error.numbers))
        self._forget(request)

    def _tell(self, request: Request, event: GenerationEvent) -> None:
        self._events.append((request.id, event))

    def _forget(self, request: Request) -> None:
        del self._live[request.id]
        self._preempted.discard(request.id)
        if not self._is_running(request):
            self._waiting = deque(other for other in self._waiting if other is not request)
            return
        self._running = [other for other in self._running if other is not request]
        if self._flying.get(request.id) is not request:
            self.pages.release(request)

    def _is_live(self, request: Request) -> bool:
        return self._live.get(request.id) is request

    def _is_running(self, request: Request) -> bool:
        return any(other is request for other in self._running)

    # ── the queue ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _check_queue(self) -> None:
        """Raises QueueFull. Requests that the next step can admit do not count as waiting."""
        about_to_run = self._limits.max_running_requests - len(self._running)
        most = self._limits.max_queued
        if len(self._waiting) >= most + about_to_run:
            raise QueueFull(
                f"{len(self._waiting)} requests are waiting already (the limit is {most}): try again later, or load "
                "the model with a larger --max-running-requests.",
                numbers={"queued": len(self._waiting), "max_queued": most},
                retry_after_s=RETRY_AFTER_S,
            )

    def _timeout(self, request: Request, place: int) -> QueueTimeout:
        pages = demand(len(request.token_ids), self.pages.rule, resumed=request.id in self._preempted).pages
        if len(self._running) >= self._limits.max_running_requests:
            reason = f"{len(self._running)} of at most {self._limits.max_running_requests} requests were running"
        else:
            reason = f"it needs up to {pages} KV pages and {self.pages.available} of {self.pages.total} were free"
        waited = self._clock.monotonic() - request.arrived_s
        return QueueTimeout(
            f"The request waited {waited:.0f} s at position {place} of {len(self._waiting)} in the queue: {reason}. "
            "Try again later, or load the model with a larger --max-running-requests or --num-tokens.",
            numbers={"waited_s": round(waited, 3), "position": place, "pages": pages, "free": self.pages.available},
            retry_after_s=RETRY_AFTER_S,
        )
